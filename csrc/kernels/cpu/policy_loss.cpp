#include <type_traits>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/policy_loss_avx2.h"
#include "kernels/cpu/policy_loss_block.h"
#include "kernels/cpu/simd.h"

namespace fastrl::cpu {
namespace {

template <class Real>
auto block_function() {
#ifdef FASTRL_WITH_AVX2
  if constexpr (std::is_same_v<Real, float>) {
    if (use_avx2()) return avx2::policy_loss_block;
  }
#endif
  return sum_block<Real>;
}

}  // namespace

template <class Real>
void policy_loss(const PolicyLossArgs<Real>& args, int num_threads) {
  const int64_t blocks = (args.sequences + kPolicyLossBlock - 1) / kPolicyLossBlock;
  // a token costs about as much as four elements of a plain loop
  const int threads = threads_for(4 * args.cu_targets[args.sequences], num_threads);
  const auto sum = block_function<Real>();
  parallel_for(blocks, threads, [&](int64_t b) { sum(args, b); });
  Sums total;
  for (int64_t b = 0; b < blocks; ++b) total.add(reinterpret_cast<const Sums*>(args.partial)[b]);
  *args.loss = total.loss;
  for (int i = 0; i < kPolicyLossStats; ++i) args.stats[i] = total.stats[i];
}

template void policy_loss(const PolicyLossArgs<float>&, int);
template void policy_loss(const PolicyLossArgs<double>&, int);

}  // namespace fastrl::cpu
