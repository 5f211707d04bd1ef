#include "kernels/packed_logprobs.h"

#include <cmath>
#include <limits>

#include "kernels/cpu/packed_logprobs_rows.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

namespace fastrl::cpu {
namespace scalar {

// e^d below this is not a normal float32; d * e^d must not become -inf * 0.
constexpr float kUnderflow = -87.33654f;

float row_max(const float* x, int64_t n) {
  float max = -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < n; ++j) max = x[j] > max ? x[j] : max;
  return max;
}

RowSums row_sums(const float* x, int64_t n, float scale, float max) {
  // float64 sums: without lanes a float32 sum over a long row would be less exact than the vector code
  double s = 0, t = 0;
  for (int64_t j = 0; j < n; ++j) {
    const float d = scale * x[j] - max;
    if (d < kUnderflow) continue;
    const float e = std::exp(d);
    s += e;
    t += static_cast<double>(e) * d;
  }
  return {static_cast<float>(s), static_cast<float>(t)};
}

void row_grad(float* x, int64_t n, const RowGrad& row) {
  for (int64_t j = 0; j < n; ++j) {
    const float lp = (row.scale * x[j] - row.row_max) - row.log_sum;
    const float p = lp < kUnderflow ? 0.0f : std::exp(lp);
    const float above = (lp < kUnderflow ? kUnderflow : lp) + row.entropy;
    x[j] = -row.scale * p * (row.grad_logprob + row.grad_entropy * above);
  }
}

}  // namespace scalar

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct RowFunctions {
  decltype(&scalar::row_max) row_max;
  decltype(&scalar::row_sums) row_sums;
  decltype(&scalar::row_grad) row_grad;
};

RowFunctions row_functions() {
#ifdef FASTRL_WITH_AVX2
  if (use_avx2()) return {avx2::row_max, avx2::row_sums, avx2::row_grad};
#endif
  return {scalar::row_max, scalar::row_sums, scalar::row_grad};
}

bool holds_target(const LogitSlab& slab, int64_t row) {
  const int64_t column = slab.targets[row] - slab.vocab_begin;
  return column >= 0 && column < slab.cols;
}

void fold_row(const LogitFoldArgs& args, int64_t i, const RowFunctions& f) {
  const LogitSlab& slab = args.slab;
  const float* x = args.logits + i * slab.row_stride;
  if (holds_target(slab, i)) args.target_logit[i] = slab.scale * x[slab.targets[i] - slab.vocab_begin];
  const float old_max = args.row_max[i];
  const float max = std::fmax(old_max, slab.scale * f.row_max(x, slab.cols));
  // Only -inf so far: nothing to add, and -inf - -inf would be NaN. A NaN row lands here or in the sums, and stays NaN
  // because its own row_max is compared away but its terms are not.
  const RowSums sums = f.row_sums(x, slab.cols, slab.scale, max == -kInfinity ? 0.0f : max);
  const float shift = old_max == -kInfinity ? 0.0f : old_max - max;
  const float c = old_max == -kInfinity ? 0.0f : std::exp(shift);
  args.sum_dexp[i] = c * (args.sum_dexp[i] + shift * args.sum_exp[i]) + sums.sum_dexp;
  args.sum_exp[i] = c * args.sum_exp[i] + sums.sum_exp;
  args.row_max[i] = max;
}

void grad_row(const LogitGradArgs& args, int64_t i, const RowFunctions& f) {
  const LogitSlab& slab = args.slab;
  float* x = args.logits + i * slab.row_stride;
  f.row_grad(
      x, slab.cols,
      {slab.scale, args.row_max[i], args.log_sum[i], args.entropy[i], args.grad_logprobs[i], args.grad_entropy[i]});
  if (holds_target(slab, i)) x[slab.targets[i] - slab.vocab_begin] += slab.scale * args.grad_logprobs[i];
}

}  // namespace

void logit_fold(const LogitFoldArgs& args, int num_threads) {
  const RowFunctions functions = row_functions();
  const int threads = threads_for(args.slab.rows * args.slab.cols, num_threads);
  parallel_for(args.slab.rows, threads, [&](int64_t i) { fold_row(args, i, functions); });
}

void logit_grad(const LogitGradArgs& args, int num_threads) {
  const RowFunctions functions = row_functions();
  const int threads = threads_for(args.slab.rows * args.slab.cols, num_threads);
  parallel_for(args.slab.rows, threads, [&](int64_t i) { grad_row(args, i, functions); });
}

}  // namespace fastrl::cpu
