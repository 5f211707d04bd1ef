// Compiled with -mavx2 -mfma: entered only after use_avx2().
#include "kernels/cpu/row_attention_vector.h"

namespace fastrl::cpu::avx2 {

BlockFunctions row_attention_block() { return {kPanel, forward, backward}; }

}  // namespace fastrl::cpu::avx2
