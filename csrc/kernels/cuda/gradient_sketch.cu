// One block per rollout. Its row of the answer first holds integers, multiples of 2^-10, which may be added in any
// order; the block turns them into floats at the end. e^x is that of the CPU kernel, operation by operation.
#include <cmath>

#include "kernels/cuda/launch.h"
#include "kernels/gradient_sketch.h"

namespace fastrl::cuda {
namespace {

constexpr int kThreads = 256;

// e^x for x <= 0, within 2 ulp; see cpu/gradient_sketch.cpp.
__device__ double exp_of(double x) {
  if (x < -40) return 0;
  const double n = floor(x * 1.4426950408889634 + 0.5);
  const double r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  constexpr double kFactorials[] = {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0,
                                    120.0,       24.0,       6.0,       2.0,      1.0,     1.0};
  double p = 1.0 / 6227020800.0;
#pragma unroll
  for (int i = 0; i < 13; ++i) p = p * r + 1.0 / kFactorials[i];
  return ldexp(p, static_cast<int>(n));
}

__global__ void __launch_bounds__(kThreads) gradient_sketch_kernel(GradientSketchArgs args, int shift) {
  const int64_t i = blockIdx.x;
  float* row = args.sketch + i * args.width;
  int* counts = reinterpret_cast<int*>(row);
  for (int64_t b = threadIdx.x; b < args.width; b += kThreads) counts[b] = 0;
  __syncthreads();
  bool broken = false;
  for (int64_t t = args.cu_seqlens[i] + threadIdx.x; t < args.cu_seqlens[i + 1]; t += kThreads) {
    const double logprob = args.logprobs[t];
    broken = broken || isnan(logprob);
    const double miss = logprob < 0 ? 1 - exp_of(logprob) : 0;
    const int q = static_cast<int>(floor(miss * 1024 + 0.5));
    const uint64_t h = mix_bits(static_cast<uint64_t>(args.token_ids[t]) + static_cast<uint64_t>(args.seed));
    atomicAdd(counts + (h >> shift), h & 1 ? -q : q);
  }
  broken = __syncthreads_or(broken);
  for (int64_t b = threadIdx.x; b < args.width; b += kThreads) {
    row[b] = broken && b == 0 ? NAN : static_cast<float>(counts[b]) / 1024;
  }
}

}  // namespace

int gradient_sketch(const GradientSketchArgs& args, void* stream) {
  if (args.rollouts == 0) return cudaSuccess;
  int shift = 64;
  for (int64_t width = args.width; width > 1; width /= 2) --shift;
  return launch(gradient_sketch_kernel, dim3(static_cast<unsigned>(args.rollouts)), dim3(kThreads), stream, args,
                shift);
}

}  // namespace fastrl::cuda
