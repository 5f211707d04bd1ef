// A sum in four lanes: a fixed order, so the answer depends on nothing else, and no long chain of additions.
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

}  // namespace fastrl::cpu
