#pragma once
#include "kernels/policy_loss.h"

namespace fastrl::cpu::avx2 {
void policy_loss_block(const PolicyLossArgs<float>& args, int64_t block);
}  // namespace fastrl::cpu::avx2
