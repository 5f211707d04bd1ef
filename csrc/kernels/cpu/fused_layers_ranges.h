// What fused_layers does on one thread: rows or numbers [first, last).
#pragma once
#include "kernels/fused_layers.h"

namespace fastrl::cpu::avx2 {

void rms_norm_rows(const RmsNormArgs& args, int64_t first, int64_t last);
// grad_weight [width] is added to; that of `grads` is left alone
void rms_norm_rows_backward(const RmsNormArgs& args, const RmsNormGrads& grads, int64_t first, int64_t last,
                            float* grad_weight);
void swiglu_range(const SwigluArgs& args, int64_t first, int64_t last);
void swiglu_range_backward(const SwigluArgs& args, const SwigluGrads& grads, int64_t first, int64_t last);

}  // namespace fastrl::cpu::avx2
