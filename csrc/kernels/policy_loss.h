// From logprobs to the loss of the policy, its gradient and its statistics, in one pass over the tokens.
//
// Sequence q holds the tokens [cu_targets[q], cu_targets[q + 1]) and has one advantage A. Token t has the logprob lp, a
// weight w in the loss (its sequence's times its own), and, where they are given, old, ref and rollout logprobs.
// A token of weight 0 is masked: whatever its numbers are, it adds to no statistic and its gradient is 0. Over the L
// other tokens of a sequence, with D(x) = x cut to [-20, 20] (so no exponential overflows, and outside dD = 0):
//
//   ratio token            r_t = exp(D(lp_t - old_t))
//         sequence         r_t = exp(mean over t of D(lp_t - old_t)), of which every token of the sequence is a part
//         sequence_token   the same number, with d r_t / d lp_t = r_t alone
//   clip  ppo              l_t = max(-A r_t, -A c_t) with c_t = r_t cut to [1 - clip_low, 1 + clip_high];
//                          where A < 0 at most -A dual_clip
//         cispo            l_t = -c_t A lp_t, c_t a constant
//   kl    k1, k2, k3       k_t = d, d^2 / 2, e^-d - 1 + d  with d = D(lp_t - ref_t)
//
//   loss = sum w_t (l_t + kl_coef k_t),   grad_t = d loss / d lp_t
//
// Without old logprobs every ratio is exactly 1. A = 0 takes the whole term l_t to 0, whatever the ratio.
// Sums are made in float64, first inside a sequence, then inside a block of kPolicyLossBlock sequences, then over the
// blocks, each in index order: no result depends on the number of threads.
#pragma once
#include <cstdint>

namespace fastrl {

enum class RatioKind : int { token = 0, sequence = 1, sequence_token = 2 };
enum class ClipKind : int { ppo = 0, cispo = 1 };
enum class KlKind : int { k1 = 0, k2 = 1, k3 = 2 };

// What is counted or summed over the unmasked tokens; fastrl_fast/ops/policy_loss.py names them in this order.
enum PolicyLossStat : int {
  kTokens,       // how many
  kClippedLow,   // A < 0 and r < 1 - clip_low
  kClippedHigh,  // A > 0 and r > 1 + clip_high
  kClippedDual,  // A < 0 and r > dual_clip (ppo)
  kRatioSum,
  kRatioMin,  // +inf where there is no token
  kRatioMax,  // -inf where there is no token
  kKlSum,     // without the coefficient
  kGapSum,    // |lp - rollout|
  kGapMax,    // -inf where there is no token or no rollout logprob
  kPolicyLossStats
};

constexpr int64_t kPolicyLossBlock = 4;

template <class Real>  // float or double
struct PolicyLossArgs {
  const Real* logprobs;                                        // [N]
  const Real *old_logprobs, *ref_logprobs, *rollout_logprobs;  // [N] or null
  const Real* advantages;                                      // [S]
  const Real* weights;                                         // [S]
  const Real* token_weights;                                   // [N] or null: all 1
  const int64_t* cu_targets;                                   // [S + 1]
  int64_t sequences;                                           // S
  RatioKind ratio;
  ClipKind clip;
  KlKind kl;
  double clip_low, clip_high;
  double dual_clip;  // +inf: none
  double kl_coef;
  double* partial;  // [blocks, 1 + kPolicyLossStats], workspace; blocks = ceil(S / kPolicyLossBlock)
  Real* grad;       // [N], out
  double* loss;     // [1], out
  double* stats;    // [kPolicyLossStats], out
};

namespace cpu {
template <class Real>
void policy_loss(const PolicyLossArgs<Real>& args, int num_threads);
}  // namespace cpu
namespace cuda {
// Asynchronous on `stream` (a cudaStream_t); pointers are device pointers, `partial` is [S, 1 + kPolicyLossStats].
// Returns a cudaError_t.
template <class Real>
int policy_loss(const PolicyLossArgs<Real>& args, void* stream);
}  // namespace cuda

}  // namespace fastrl
