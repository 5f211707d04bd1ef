// Compiled with -mavx512f: entered only after use_avx512().
#include "kernels/cpu/row_attention_vector.h"

namespace fastrl::cpu::avx512 {

BlockFunctions row_attention_block() { return {kPanel, forward, backward}; }

}  // namespace fastrl::cpu::avx512
