// The choice between AVX2 and scalar code, and (only for files compiled with -mavx2 -mfma) the vector functions.
// Vector functions live in an anonymous namespace: a linker that merged an inline AVX2 function into a scalar file
// would crash on an old processor.
#pragma once
#include <cstdlib>

namespace fastrl::cpu {

// FASTRL_FORCE_SCALAR=1 tests the fallback on a processor that has AVX2.
inline bool use_avx2() {
#ifdef FASTRL_WITH_AVX2
  static const bool answer = [] {
    const char* scalar = std::getenv("FASTRL_FORCE_SCALAR");
    const bool forced = scalar != nullptr && scalar[0] == '1';
    return !forced && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }();
  return answer;
#else
  return false;
#endif
}

}  // namespace fastrl::cpu

#ifdef __AVX2__
#include <immintrin.h>

namespace {

// ln(2^-126): below it e^x is not a normal float32 and counts as 0.
constexpr float kExpUnderflow = -87.33654f;

// e^x for x <= 88; 0 below kExpUnderflow, NaN for NaN. x = n ln 2 + r with |r| <= ln 2 / 2, where the Taylor series to
// r^7 leaves 5e-9: the result is within about 1 ulp.
inline __m256 exp_ps(__m256 x) {
  const __m256 underflow = _mm256_cmp_ps(x, _mm256_set1_ps(kExpUnderflow), _CMP_LT_OQ);
  x = _mm256_max_ps(_mm256_set1_ps(kExpUnderflow), x);  // operand order keeps NaN
  const __m256 n =
      _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // ln 2 in two parts, the first with trailing zeros so that n * ln2_high is exact
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.0f / 5040);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(underflow, _mm256_mul_ps(p, _mm256_castsi256_ps(exponent)));
}

inline float sum_of(__m256 v) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  a = _mm_add_ss(a, _mm_movehdup_ps(a));
  return _mm_cvtss_f32(a);
}

inline float max_of(__m256 v) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  a = _mm_max_ss(a, _mm_movehdup_ps(a));
  return _mm_cvtss_f32(a);
}

// Lanes [0, count) of a load: the tail of a row is computed by the same vector code as its body.
inline __m256i tail_mask(long count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
}

}  // namespace
#endif
