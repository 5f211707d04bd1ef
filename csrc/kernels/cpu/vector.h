// One register of float32, as wide as the including file is compiled for: 16 numbers with -mavx512f, 8 with -mavx2.
// In an anonymous namespace for the reason that simd.h gives.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

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

#ifdef __AVX512F__
using Vector = __m512;
constexpr int64_t kWidth = 16;

inline Vector load(const float* x) { return _mm512_loadu_ps(x); }
inline void store(float* x, Vector v) { _mm512_storeu_ps(x, v); }
inline Vector all(float x) { return _mm512_set1_ps(x); }
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
inline Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
inline Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }  // b where a is NaN or b is
inline Vector fmadd(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector fnmadd(Vector a, Vector b, Vector c) { return _mm512_fnmadd_ps(a, b, c); }
inline Vector nearest(Vector v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2^n of whole numbers n from -126 to 127
inline Vector power_of_two(Vector n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}
// v, but 0 where x < bound
inline Vector zero_below(Vector v, Vector x, float bound) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(bound), _CMP_NLT_UQ), v);
}
// The first `count` numbers of v, then others of `rest`
inline Vector first_of(Vector v, int64_t count, Vector rest) {
  return _mm512_mask_mov_ps(rest, static_cast<__mmask16>((1u << count) - 1), v);
}
inline __m256 upper_half(Vector v) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)); }
inline float sum_of(Vector v) { return sum_of(_mm256_add_ps(_mm512_castps512_ps256(v), upper_half(v))); }
inline float max_of(Vector v) { return max_of(_mm256_max_ps(_mm512_castps512_ps256(v), upper_half(v))); }
#else
using Vector = __m256;
constexpr int64_t kWidth = 8;

inline Vector load(const float* x) { return _mm256_loadu_ps(x); }
inline void store(float* x, Vector v) { _mm256_storeu_ps(x, v); }
inline Vector all(float x) { return _mm256_set1_ps(x); }
inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
inline Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
inline Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }  // b where a is NaN or b is
inline Vector min(Vector a, Vector b) { return _mm256_min_ps(a, b); }  // likewise
inline Vector div(Vector a, Vector b) { return _mm256_div_ps(a, b); }
inline Vector fmadd(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector fnmadd(Vector a, Vector b, Vector c) { return _mm256_fnmadd_ps(a, b, c); }
inline Vector nearest(Vector v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vector power_of_two(Vector n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline Vector zero_below(Vector v, Vector x, float bound) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, all(bound), _CMP_LT_OQ), v);
}
// Lanes [0, count) of a load: the tail of a row is computed by the same vector code as its body.
inline __m256i tail_mask(int64_t count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
}
inline Vector first_of(Vector v, int64_t count, Vector rest) {
  return _mm256_blendv_ps(rest, v, _mm256_castsi256_ps(tail_mask(count)));
}
#endif

// ln(2^-126): below it e^x is not a normal float32 and counts as 0.
constexpr float kExpUnderflow = -87.33654f;

// e^x for x <= 88; 0 below kExpUnderflow, NaN for NaN. x = n ln 2 + r with |r| <= ln 2 / 2, where the Taylor series to
// r^7 leaves 5e-9: the result is within about 1 ulp.
inline Vector exp_ps(Vector given) {
  const Vector x = max(all(kExpUnderflow), given);  // operand order keeps NaN
  const Vector n = nearest(mul(x, all(1.44269504f)));
  // ln 2 in two parts, the first with trailing zeros so that n * ln2_high is exact
  Vector r = fnmadd(n, all(0.693359375f), x);
  r = fnmadd(n, all(-2.12194440e-4f), r);
  Vector p = all(1.0f / 5040);
  p = fmadd(p, r, all(1.0f / 720));
  p = fmadd(p, r, all(1.0f / 120));
  p = fmadd(p, r, all(1.0f / 24));
  p = fmadd(p, r, all(1.0f / 6));
  p = fmadd(p, r, all(0.5f));
  p = fmadd(p, r, all(1.0f));
  p = fmadd(p, r, all(1.0f));
  return zero_below(mul(p, power_of_two(n)), given, kExpUnderflow);
}

}  // namespace
