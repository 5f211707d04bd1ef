// The CUDA operators behind a C interface for ctypes: the parameters of the functions in csrc/bindings.cpp, less the
// stream.
#include "kernels/choose_rollouts.h"
#include "kernels/gradient_sketch.h"
#include "kernels/group_advantage.h"
#include "kernels/packed_logprobs.h"
#include "kernels/policy_loss.h"
#include "kernels/selection.h"

using namespace fastrl;

extern "C" {

int group_advantage_cuda(const double* rewards, const int64_t* cu, int64_t groups, bool divide_by_std,
                         bool leave_one_out, int ddof, double eps, float* out, bool* dead) {
  return cuda::group_advantage({rewards, cu, groups, divide_by_std, leave_one_out, ddof, eps, out, dead}, nullptr);
}

int logit_fold_cuda(const float* logits, int64_t rows, int64_t cols, int64_t stride, int64_t vocab_begin,
                    const int64_t* targets, float scale, float* row_max, float* sum_exp, float* sum_dexp,
                    float* target_logit) {
  const LogitSlab slab{rows, cols, stride, vocab_begin, targets, scale};
  return cuda::logit_fold({slab, logits, row_max, sum_exp, sum_dexp, target_logit}, nullptr);
}

int logit_grad_cuda(float* logits, int64_t rows, int64_t cols, int64_t stride, int64_t vocab_begin,
                    const int64_t* targets, float scale, const float* row_max, const float* log_sum,
                    const float* entropy, const float* grad_logprobs, const float* grad_entropy, void* grad_bf16) {
  const LogitSlab slab{rows, cols, stride, vocab_begin, targets, scale};
  return cuda::logit_grad({slab, logits, row_max, log_sum, entropy, grad_logprobs, grad_entropy}, grad_bf16, nullptr);
}

int gradient_sketch_cuda(const int64_t* token_ids, const float* logprobs, int64_t, const int64_t* cu_seqlens,
                         int64_t rollouts, int64_t width, int64_t seed, float* sketch) {
  return cuda::gradient_sketch({token_ids, logprobs, cu_seqlens, rollouts, width, seed, sketch}, nullptr);
}

int64_t choose_rollouts_workspace(int rule, int64_t rollouts, int64_t groups, int64_t width, int64_t k) {
  return cuda::choose_rollouts_workspace(static_cast<ChooseRule>(rule), rollouts, groups, width, k);
}

int choose_rollouts_cuda(const float* vectors, const float* advantages, int64_t rollouts, const int64_t* cu,
                         int64_t groups, int64_t width, int rule, int64_t k, int64_t seed, float* weights,
                         int64_t* order, double* fidelity, double* workspace) {
  const ChooseRolloutsArgs args{vectors, advantages, cu,      groups, width,   static_cast<ChooseRule>(rule),
                                k,       seed,       weights, order,  fidelity};
  return cuda::choose_rollouts(args, rollouts, workspace, nullptr);
}

int policy_loss_cuda(bool is_double, int64_t, const void* logprobs, const void* old, const void* ref,
                     const void* rollout, const void* advantages, const void* weights, const void* token_weights,
                     const int64_t* cu_targets, int64_t sequences, int ratio, int clip, int kl, double clip_low,
                     double clip_high, double dual_clip, double kl_coef, double* partial, void* grad, double* loss,
                     double* stats) {
  const auto run = [&](auto real) {
    using Real = decltype(real);
    const auto in = [](const void* p) { return static_cast<const Real*>(p); };
    const PolicyLossArgs<Real> args{in(logprobs),
                                    in(old),
                                    in(ref),
                                    in(rollout),
                                    in(advantages),
                                    in(weights),
                                    in(token_weights),
                                    cu_targets,
                                    sequences,
                                    static_cast<RatioKind>(ratio),
                                    static_cast<ClipKind>(clip),
                                    static_cast<KlKind>(kl),
                                    clip_low,
                                    clip_high,
                                    dual_clip,
                                    kl_coef,
                                    partial,
                                    static_cast<Real*>(grad),
                                    loss,
                                    stats};
    return cuda::policy_loss(args, nullptr);
  };
  return is_double ? run(double{}) : run(float{});
}

int64_t select_diverse_workspace(int64_t tokens, int64_t rollouts) {
  return cuda::select_diverse_workspace(tokens, rollouts);
}

int select_diverse_cuda(const int64_t* token_ids, int64_t tokens, const int64_t* cu_seqlens,
                        const int64_t* cu_group_sizes, int64_t groups, const int64_t* classes, int64_t tau_millionths,
                        int ngram, bool seed_only, int* workspace, bool* kept, int64_t* representative) {
  const SelectDiverseArgs args{token_ids,      cu_seqlens, cu_group_sizes, classes, groups,
                               tau_millionths, ngram,      seed_only,      kept,    representative};
  return cuda::select_diverse(args, tokens, workspace, nullptr);
}
}
