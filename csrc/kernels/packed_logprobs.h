// The one-pass work around the GEMMs of a language-model head. Logits come in slabs x [rows, cols] of the vocabulary
// [vocab_begin, vocab_begin + cols), float32, fresh from the GEMM; z = scale * x. Per row, over all slabs so far:
//
//   m = max z,   s = sum e^d,   t = sum d e^d   with d = z - m,   z_y = z[target]
//
// and when a slab brings a larger maximum m', with c = e^(m - m'):   s' = c s + s2,   t' = c (t + (m - m') s) + t2.
// Start from m = -inf, s = t = 0. At the end ln s is the log-sum, logprob = (z_y - m) - ln s and
// entropy = ln s - t / s: m and ln s are never added, so logits of size 1e4 lose nothing.
//
// Backward of upstream g (of logprob) and h (of entropy), overwriting the slab with the gradient of x:
//   lp = (z - m) - ln s,  p = e^lp,   dx = scale * (g * (1[v = y] - p) - h * p * (lp + entropy))
//
// A logit of -inf has p = 0 and adds nothing; NaN and +inf come out as NaN.
#pragma once
#include <cstdint>

namespace fastrl {

struct LogitSlab {
  int64_t rows, cols, row_stride;  // stride in elements
  int64_t vocab_begin;
  const int64_t* targets;  // [rows], in [0, V)
  float scale;
};

struct LogitFoldArgs {
  LogitSlab slab;
  const float* logits;                                 // [rows, cols]
  float *row_max, *sum_exp, *sum_dexp, *target_logit;  // [rows], in and out: m, s, t, z_y
};

struct LogitGradArgs {
  LogitSlab slab;
  float* logits;                              // [rows, cols], in: x, out: dx
  const float *row_max, *log_sum, *entropy;   // [rows]
  const float *grad_logprobs, *grad_entropy;  // [rows]
};

namespace cpu {
void logit_fold(const LogitFoldArgs& args, int num_threads);
void logit_grad(const LogitGradArgs& args, int num_threads);
}  // namespace cpu
namespace cuda {
// Asynchronous on `stream` (a cudaStream_t); pointers are device pointers. Each returns a cudaError_t.
int logit_fold(const LogitFoldArgs& args, void* stream);
// `grad_bf16` [rows, cols], contiguous: where dx goes as bfloat16, the logits staying as they are; null overwrites
// them.
int logit_grad(const LogitGradArgs& args, void* grad_bf16, void* stream);
}  // namespace cuda

}  // namespace fastrl
