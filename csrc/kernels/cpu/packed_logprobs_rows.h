// Row functions of packed_logprobs, each in a scalar and an AVX2 version; the loops over rows are in
// packed_logprobs.cpp.
#pragma once
#include <cstdint>

namespace fastrl::cpu {

struct RowSums {
  float sum_exp, sum_dexp;  // sum e^d, sum d e^d
};

struct RowGrad {
  float scale, row_max, log_sum, entropy, grad_logprob, grad_entropy;
};

namespace scalar {
float row_max(const float* x, int64_t n);                             // -inf for an empty row
RowSums row_sums(const float* x, int64_t n, float scale, float max);  // d = scale * x - max
void row_grad(float* x, int64_t n, const RowGrad& row);               // without the 1[v = y] term
}  // namespace scalar
namespace avx2 {
float row_max(const float* x, int64_t n);
RowSums row_sums(const float* x, int64_t n, float scale, float max);
void row_grad(float* x, int64_t n, const RowGrad& row);
}  // namespace avx2

}  // namespace fastrl::cpu
