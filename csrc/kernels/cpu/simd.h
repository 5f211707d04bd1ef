// The choice between vector and scalar code at run time. Only files that CMakeLists.txt compiles for AVX2 or AVX-512
// hold such instructions. What they include of vector code lives in an anonymous namespace: a linker that merged an
// inline function of theirs into a scalar file would crash on an old processor.
#pragma once
#include <cstdlib>

namespace fastrl::cpu {

inline bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && value[0] == '1';
}

// FASTRL_FORCE_SCALAR=1 tests the fallback on a processor that has AVX2.
inline bool use_avx2() {
#ifdef FASTRL_WITH_AVX2
  static const bool answer =
      !is_set("FASTRL_FORCE_SCALAR") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return answer;
#else
  return false;
#endif
}

// FASTRL_FORCE_AVX2=1 tests the code for AVX2 on a processor that has AVX-512.
inline bool use_avx512() {
#ifdef FASTRL_WITH_AVX2
  static const bool answer = use_avx2() && !is_set("FASTRL_FORCE_AVX2") && __builtin_cpu_supports("avx512f");
  return answer;
#else
  return false;
#endif
}

}  // namespace fastrl::cpu
