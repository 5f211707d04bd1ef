// Reductions in four lanes: a fixed order, so the answer depends on nothing else, and no long chain of additions.
#pragma once
#include <cstdint>

namespace fastrl::cpu {

// term(0) + ... + term(n - 1) in float64.
template <class Term>
double lane_sum(int64_t n, const Term& term) {
  double lanes[4] = {0, 0, 0, 0};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int k = 0; k < 4; ++k) lanes[k] += term(i + k);
  }
  for (int k = 0; i < n; ++i, ++k) lanes[k] += term(i);
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// The largest term, or `lowest`; NaN is passed over.
template <class Real, class Term>
Real lane_max(int64_t n, Real lowest, const Term& term) {
  Real lanes[4] = {lowest, lowest, lowest, lowest};
  const auto take = [&](int k, Real x) { lanes[k] = x > lanes[k] ? x : lanes[k]; };
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int k = 0; k < 4; ++k) take(k, term(i + k));
  }
  for (int k = 0; i < n; ++i, ++k) take(k, term(i));
  for (int k = 1; k < 4; ++k) take(0, lanes[k]);
  return lanes[0];
}

}  // namespace fastrl::cpu
