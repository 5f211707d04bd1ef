// Compiled with -mavx2 -mfma: no function here may be reached without the check in simd.h.
#include "kernels/cpu/policy_loss_avx2.h"

#include "kernels/cpu/policy_loss_block.h"

namespace fastrl::cpu::avx2 {

void policy_loss_block(const PolicyLossArgs<float>& args, int64_t block) { sum_block(args, block); }

}  // namespace fastrl::cpu::avx2
