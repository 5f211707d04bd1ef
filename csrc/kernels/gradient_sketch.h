// A short vector per rollout whose inner products stand for those of its policy gradient, from what the sampler knows.
//
// With the hidden states left out, the gradient of sum_t ln pi(y_t) along the logits is near sum_t (1 - pi_t) e_{y_t},
// a vector over the vocabulary. Its coordinates are hashed into `width` buckets with random signs:
//
//   sketch[i][h(y_t)] += sign(y_t) q_t   with q_t = 1 - e^logprob_t rounded to a multiple of 2^-10
//
// With h = mix(token + seed): bucket = the top log2(width) bits of h, sign = + where the lowest bit of h is 0. Sums of
// such q are exact in float32 up to 16384 tokens in one bucket, so the order of addition does not matter; e^x is made
// of float64 additions and multiplications alone, in one order and never contracted, so that every machine rounds
// alike. A logprob that is NaN makes the rollout's first bucket NaN, which keeps it out of every choice.
#pragma once
#include <cstdint>

namespace fastrl {

struct GradientSketchArgs {
  const int64_t* token_ids;   // [T]
  const float* logprobs;      // [T]
  const int64_t* cu_seqlens;  // [N + 1]
  int64_t rollouts;           // N
  int64_t width;              // a power of two in [2, 2^20]
  int64_t seed;
  float* sketch;  // [N, width], out
};

// splitmix64's finaliser: every bit of the answer depends on every bit of x.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline uint64_t mix_bits(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

namespace cpu {
void gradient_sketch(const GradientSketchArgs& args, int num_threads);
}
namespace cuda {
// Asynchronous on `stream` (a cudaStream_t); pointers are device pointers. Returns a cudaError_t.
int gradient_sketch(const GradientSketchArgs& args, void* stream);
}  // namespace cuda

}  // namespace fastrl
