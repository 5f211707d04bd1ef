// Compiled with -mavx2 -mfma; entered only after use_avx2(). Includes no header with inline functions of others.
#include "kernels/cpu/packed_logprobs_rows.h"
#include "kernels/cpu/vector.h"

namespace fastrl::cpu::avx2 {
namespace {

// Below the underflow bound d * e^d would be -inf * 0 for a logit of -inf; clamped it is -87 * 0.
inline __m256 clamped(__m256 d) { return _mm256_max_ps(_mm256_set1_ps(kExpUnderflow), d); }

// scale * x is rounded before max is taken off, as max itself was: the largest logit has d = 0 exactly and s >= 1.
inline __m256 minus_max(__m256 x, __m256 scale, __m256 max) { return _mm256_sub_ps(_mm256_mul_ps(x, scale), max); }

inline __m256 grad_of(__m256 x, __m256 scale, __m256 max, __m256 log_sum, __m256 g, __m256 h, __m256 entropy) {
  const __m256 lp = _mm256_sub_ps(minus_max(x, scale, max), log_sum);
  const __m256 p = exp_ps(lp);
  const __m256 pull = _mm256_fmadd_ps(h, _mm256_add_ps(clamped(lp), entropy), g);
  return _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(p, pull));
}

}  // namespace

float row_max(const float* x, int64_t n) {
  const __m256 lowest = _mm256_set1_ps(-__builtin_inff());
  __m256 a = lowest, b = lowest;
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) {
    a = _mm256_max_ps(a, _mm256_loadu_ps(x + j));
    b = _mm256_max_ps(b, _mm256_loadu_ps(x + j + 8));
  }
  for (; j < n; j += 8) {
    const __m256i mask = n - j >= 8 ? _mm256_set1_epi32(-1) : tail_mask(n - j);
    const __m256 v = _mm256_maskload_ps(x + j, mask);
    a = _mm256_max_ps(a, _mm256_blendv_ps(lowest, v, _mm256_castsi256_ps(mask)));
  }
  return max_of(_mm256_max_ps(a, b));
}

RowSums row_sums(const float* x, int64_t n, float scale, float max) {
  const __m256 k = _mm256_set1_ps(scale), m = _mm256_set1_ps(max);
  __m256 s0 = _mm256_setzero_ps(), s1 = s0, t0 = s0, t1 = s0;
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) {
    const __m256 d0 = minus_max(_mm256_loadu_ps(x + j), k, m);
    const __m256 d1 = minus_max(_mm256_loadu_ps(x + j + 8), k, m);
    const __m256 e0 = exp_ps(d0), e1 = exp_ps(d1);
    s0 = _mm256_add_ps(s0, e0);
    s1 = _mm256_add_ps(s1, e1);
    t0 = _mm256_fmadd_ps(e0, clamped(d0), t0);
    t1 = _mm256_fmadd_ps(e1, clamped(d1), t1);
  }
  for (; j < n; j += 8) {
    const __m256i mask = n - j >= 8 ? _mm256_set1_epi32(-1) : tail_mask(n - j);
    const __m256 d = minus_max(_mm256_maskload_ps(x + j, mask), k, m);
    const __m256 e = _mm256_and_ps(exp_ps(d), _mm256_castsi256_ps(mask));
    s0 = _mm256_add_ps(s0, e);
    t0 = _mm256_fmadd_ps(e, clamped(_mm256_and_ps(d, _mm256_castsi256_ps(mask))), t0);
  }
  return {sum_of(_mm256_add_ps(s0, s1)), sum_of(_mm256_add_ps(t0, t1))};
}

void row_grad(float* x, int64_t n, const RowGrad& row) {
  const __m256 k = _mm256_set1_ps(row.scale), m = _mm256_set1_ps(row.row_max), l = _mm256_set1_ps(row.log_sum);
  const __m256 g = _mm256_set1_ps(row.scale * row.grad_logprob), h = _mm256_set1_ps(row.scale * row.grad_entropy);
  const __m256 entropy = _mm256_set1_ps(row.entropy);
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    _mm256_storeu_ps(x + j, grad_of(_mm256_loadu_ps(x + j), k, m, l, g, h, entropy));
  }
  if (j < n) {
    const __m256i mask = tail_mask(n - j);
    _mm256_maskstore_ps(x + j, mask, grad_of(_mm256_maskload_ps(x + j, mask), k, m, l, g, h, entropy));
  }
}

}  // namespace fastrl::cpu::avx2
