// Table of contents of the compiled part: one m.def per operator and place. Pointers come as integers from tensors that
// fastrl_fast/ops has typed and sized; here only what a wrong pointer would not survive is checked. Nothing is
// computed.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "kernels/choose_rollouts.h"
#include "kernels/cpu/simd.h"
#include "kernels/fused_layers.h"
#include "kernels/gradient_sketch.h"
#include "kernels/group_advantage.h"
#include "kernels/packed_logprobs.h"
#include "kernels/policy_loss.h"
#include "kernels/row_attention.h"
#include "kernels/selection.h"

#ifdef FASTRL_WITH_CUDA
#include <nvtx3/nvtx3.hpp>
#endif

namespace py = pybind11;
using namespace fastrl;

namespace {

// Raise it with every change of a signature below; fastrl_fast/ops/_lib.py holds the same number.
constexpr int kInterface = 3;

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void check(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

// Offsets [count + 1] that cut [0, total) into pieces; anything else would read past an array.
void check_offsets(const char* name, const int64_t* offsets, int64_t count, int64_t total) {
  check(count >= 0 && offsets[0] == 0, std::string(name) + " must start with 0");
  for (int64_t i = 0; i < count; ++i) {
    // the words are made only where they are needed: there may be an offset per token
    if (offsets[i] <= offsets[i + 1]) continue;
    check(false, std::string(name) + " must not decrease, but does after index " + std::to_string(i));
  }
  check(offsets[count] == total,
        std::string(name) + " must end with " + std::to_string(total) + ", not " + std::to_string(offsets[count]));
}

void check_pieces(const RowPiece* pieces, int64_t count, int64_t tokens) {
  for (int64_t i = 0, start = 0; i < count; start = pieces[i++].end) {
    const std::string which = "piece " + std::to_string(i);
    check(pieces[i].start == start && pieces[i].end >= start, which + " must start where the one before it ends");
    check(pieces[i].prompt >= -1 && pieces[i].prompt < i, which + " must have an earlier piece as its prompt, or -1");
  }
  check((count == 0 ? 0 : pieces[count - 1].end) == tokens, "pieces must end with " + std::to_string(tokens));
}

RowAttentionArgs row_attention_args(uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t pieces, int64_t count,
                                    int64_t tokens, int64_t kv_heads, int64_t repeats, int64_t head_dim, double scale,
                                    uintptr_t out, uintptr_t lse) {
  const int64_t multiple = cpu::row_attention_multiple();
  check(multiple > 0 && head_dim > 0 && head_dim % multiple == 0, "no code for heads of " + std::to_string(head_dim));
  check_pieces(at<RowPiece>(pieces), count, tokens);
  return {at<float>(q),  at<float>(k), at<float>(v), at<RowPiece>(pieces),      count,
          kv_heads,      repeats,      head_dim,     static_cast<float>(scale), at<float>(out),
          at<float>(lse)};
}

void refuse_infinite(const double* rewards, int64_t count) {
  const double* found = std::find_if(rewards, rewards + count, [](double r) { return std::isinf(r); });
  const std::string which = std::to_string(found - rewards);
  check(false, "rewards must be finite, or NaN where ungraded; reward " + which + " is infinite");
}

GroupAdvantageArgs group_advantage_args(uintptr_t rewards, uintptr_t cu, int64_t groups, bool divide_by_std,
                                        bool leave_one_out, int ddof, double eps, uintptr_t out, uintptr_t dead) {
  return {at<double>(rewards), at<int64_t>(cu), groups, divide_by_std, leave_one_out, ddof, eps,
          at<float>(out),      at<bool>(dead)};
}

LogitSlab logit_slab(int64_t rows, int64_t cols, int64_t stride, int64_t vocab_begin, uintptr_t targets, float scale) {
  check(rows >= 0 && cols >= 0 && stride >= cols, "a slab needs rows >= 0 and 0 <= cols <= stride");
  return {rows, cols, stride, vocab_begin, at<int64_t>(targets), scale};
}

SelectDiverseArgs select_diverse_args(uintptr_t token_ids, uintptr_t cu_seqlens, uintptr_t cu_group_sizes,
                                      int64_t groups, uintptr_t classes, int64_t tau_millionths, int ngram,
                                      bool seed_only, uintptr_t kept, uintptr_t representative) {
  return {at<int64_t>(token_ids),
          at<int64_t>(cu_seqlens),
          at<int64_t>(cu_group_sizes),
          at<int64_t>(classes),
          groups,
          tau_millionths,
          ngram,
          seed_only,
          at<bool>(kept),
          at<int64_t>(representative)};
}

// The same pointers as float or as double: their own type cannot be known here.
template <class Real>
PolicyLossArgs<Real> policy_loss_args(uintptr_t logprobs, uintptr_t old, uintptr_t ref, uintptr_t rollout,
                                      uintptr_t advantages, uintptr_t weights, uintptr_t token_weights,
                                      uintptr_t cu_targets, int64_t sequences, int ratio, int clip, int kl,
                                      double clip_low, double clip_high, double dual_clip, double kl_coef,
                                      uintptr_t partial, uintptr_t grad, uintptr_t loss, uintptr_t stats) {
  return {at<Real>(logprobs),
          at<Real>(old),
          at<Real>(ref),
          at<Real>(rollout),
          at<Real>(advantages),
          at<Real>(weights),
          at<Real>(token_weights),
          at<int64_t>(cu_targets),
          sequences,
          static_cast<RatioKind>(ratio),
          static_cast<ClipKind>(clip),
          static_cast<KlKind>(kl),
          clip_low,
          clip_high,
          dual_clip,
          kl_coef,
          at<double>(partial),
          at<Real>(grad),
          at<double>(loss),
          at<double>(stats)};
}

ChooseRolloutsArgs choose_rollouts_args(uintptr_t vectors, uintptr_t advantages, uintptr_t cu_group_sizes,
                                        int64_t groups, int64_t width, int rule, int64_t k, int64_t seed,
                                        uintptr_t weights, uintptr_t order, uintptr_t fidelity) {
  return {at<float>(vectors),
          at<float>(advantages),
          at<int64_t>(cu_group_sizes),
          groups,
          width,
          static_cast<ChooseRule>(rule),
          k,
          seed,
          at<float>(weights),
          at<int64_t>(order),
          at<double>(fidelity)};
}

#ifdef FASTRL_WITH_CUDA
void check_cuda(const char* op, int error) {
  if (error != 0) throw std::runtime_error(std::string(op) + ": CUDA error " + std::to_string(error));
}

struct NvtxDomain {
  static constexpr const char* name{"fastrl_fast"};
};
using NvtxRange = nvtx3::scoped_range_in<NvtxDomain>;
#endif

}  // namespace

PYBIND11_MODULE(_fastrl_fast, m) {
  m.attr("INTERFACE") = kInterface;
  m.attr("SIMD") = cpu::use_avx512() ? "avx512" : cpu::use_avx2() ? "avx2" : "scalar";

  m.def(
      "group_advantage_cpu", [](uintptr_t rewards, int64_t count, uintptr_t cu, int64_t groups, bool divide_by_std,
                                bool leave_one_out, int ddof, double eps, uintptr_t out, uintptr_t dead, int threads) {
        const auto args = group_advantage_args(rewards, cu, groups, divide_by_std, leave_one_out, ddof, eps, out, dead);
        check_offsets("cu_group_sizes", args.cu_group_sizes, groups, count);
        bool finite;
        {
          py::gil_scoped_release release;
          finite = cpu::group_advantage(args, threads);
        }
        if (!finite) refuse_infinite(args.rewards, count);
      });

  m.def("logit_fold_cpu",
        [](uintptr_t logits, int64_t rows, int64_t cols, int64_t stride, int64_t vocab_begin, uintptr_t targets,
           float scale, uintptr_t row_max, uintptr_t sum_exp, uintptr_t sum_dexp, uintptr_t target_logit, int threads) {
          const LogitFoldArgs args{logit_slab(rows, cols, stride, vocab_begin, targets, scale),
                                   at<float>(logits),
                                   at<float>(row_max),
                                   at<float>(sum_exp),
                                   at<float>(sum_dexp),
                                   at<float>(target_logit)};
          py::gil_scoped_release release;
          cpu::logit_fold(args, threads);
        });

  m.def("logit_grad_cpu", [](uintptr_t logits, int64_t rows, int64_t cols, int64_t stride, int64_t vocab_begin,
                             uintptr_t targets, float scale, uintptr_t row_max, uintptr_t log_sum, uintptr_t entropy,
                             uintptr_t grad_logprobs, uintptr_t grad_entropy, int threads) {
    const LogitGradArgs args{logit_slab(rows, cols, stride, vocab_begin, targets, scale),
                             at<float>(logits),
                             at<float>(row_max),
                             at<float>(log_sum),
                             at<float>(entropy),
                             at<float>(grad_logprobs),
                             at<float>(grad_entropy)};
    py::gil_scoped_release release;
    cpu::logit_grad(args, threads);
  });

  m.def("select_diverse_cpu", [](uintptr_t token_ids, int64_t tokens, uintptr_t cu_seqlens, int64_t rollouts,
                                 uintptr_t cu_group_sizes, int64_t groups, uintptr_t classes, int64_t tau_millionths,
                                 int ngram, bool seed_only, uintptr_t kept, uintptr_t representative, int threads) {
    const auto args = select_diverse_args(token_ids, cu_seqlens, cu_group_sizes, groups, classes, tau_millionths, ngram,
                                          seed_only, kept, representative);
    check_offsets("cu_seqlens", args.cu_seqlens, rollouts, tokens);
    check_offsets("cu_group_sizes", args.cu_group_sizes, groups, rollouts);
    py::gil_scoped_release release;
    cpu::select_diverse(args, threads);
  });

  m.attr("POLICY_LOSS_STATS") = static_cast<int>(kPolicyLossStats);
  m.attr("POLICY_LOSS_BLOCK") = kPolicyLossBlock;
  m.def("policy_loss_cpu",
        [](bool is_double, int64_t tokens, uintptr_t logprobs, uintptr_t old, uintptr_t ref, uintptr_t rollout,
           uintptr_t advantages, uintptr_t weights, uintptr_t token_weights, uintptr_t cu_targets, int64_t sequences,
           int ratio, int clip, int kl, double clip_low, double clip_high, double dual_clip, double kl_coef,
           uintptr_t partial, uintptr_t grad, uintptr_t loss, uintptr_t stats, int threads) {
          check_offsets("cu_targets", at<int64_t>(cu_targets), sequences, tokens);
          const auto run = [&](auto real) {
            const auto args = policy_loss_args<decltype(real)>(
                logprobs, old, ref, rollout, advantages, weights, token_weights, cu_targets, sequences, ratio, clip, kl,
                clip_low, clip_high, dual_clip, kl_coef, partial, grad, loss, stats);
            py::gil_scoped_release release;
            cpu::policy_loss(args, threads);
          };
          is_double ? run(double{}) : run(float{});
        });

  m.def("gradient_sketch_cpu", [](uintptr_t token_ids, uintptr_t logprobs, int64_t tokens, uintptr_t cu_seqlens,
                                  int64_t rollouts, int64_t width, int64_t seed, uintptr_t sketch, int threads) {
    const GradientSketchArgs args{
        at<int64_t>(token_ids), at<float>(logprobs), at<int64_t>(cu_seqlens), rollouts, width, seed, at<float>(sketch)};
    check_offsets("cu_seqlens", args.cu_seqlens, rollouts, tokens);
    py::gil_scoped_release release;
    cpu::gradient_sketch(args, threads);
  });

  m.def("choose_rollouts_cpu", [](uintptr_t vectors, uintptr_t advantages, int64_t rollouts, uintptr_t cu_group_sizes,
                                  int64_t groups, int64_t width, int rule, int64_t k, int64_t seed, uintptr_t weights,
                                  uintptr_t order, uintptr_t fidelity, int threads) {
    const auto args = choose_rollouts_args(vectors, advantages, cu_group_sizes, groups, width, rule, k, seed, weights,
                                           order, fidelity);
    check_offsets("cu_group_sizes", args.cu_group_sizes, groups, rollouts);
    py::gil_scoped_release release;
    cpu::choose_rollouts(args, threads);
  });

  // Heads of a multiple of it have code here; 0 where none have.
  m.attr("ROW_ATTENTION_MULTIPLE") = cpu::row_attention_multiple();
  m.def("row_attention_cpu", [](uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t pieces, int64_t count, int64_t tokens,
                                int64_t kv_heads, int64_t repeats, int64_t head_dim, double scale, uintptr_t out,
                                uintptr_t lse, int threads) {
    const auto args = row_attention_args(q, k, v, pieces, count, tokens, kv_heads, repeats, head_dim, scale, out, lse);
    py::gil_scoped_release release;
    cpu::row_attention(args, threads);
  });
  m.def("row_attention_backward_cpu", [](uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t pieces, int64_t count,
                                         int64_t tokens, int64_t kv_heads, int64_t repeats, int64_t head_dim,
                                         double scale, uintptr_t out, uintptr_t lse, uintptr_t grad_out,
                                         uintptr_t grad_q, uintptr_t grad_k, uintptr_t grad_v, int threads) {
    const auto args = row_attention_args(q, k, v, pieces, count, tokens, kv_heads, repeats, head_dim, scale, out, lse);
    const RowAttentionGrads grads{at<float>(grad_out), at<float>(grad_q), at<float>(grad_k), at<float>(grad_v)};
    py::gil_scoped_release release;
    cpu::row_attention_backward(args, grads, threads);
  });

  m.attr("FUSED_LAYERS") = cpu::use_avx2();
#ifdef FASTRL_WITH_AVX2
  m.def("rms_norm_cpu", [](uintptr_t x, uintptr_t weight, int64_t rows, int64_t width, double eps, uintptr_t out,
                           uintptr_t inverse_root, int threads) {
    const RmsNormArgs args{at<float>(x),   at<float>(weight),      rows, width, static_cast<float>(eps),
                           at<float>(out), at<float>(inverse_root)};
    py::gil_scoped_release release;
    cpu::rms_norm(args, threads);
  });
  m.def("rms_norm_backward_cpu", [](uintptr_t x, uintptr_t weight, int64_t rows, int64_t width, uintptr_t inverse_root,
                                    uintptr_t grad_out, uintptr_t grad_x, uintptr_t grad_weight, int threads) {
    const RmsNormArgs args{at<float>(x), at<float>(weight), rows, width, 0.0f, nullptr, at<float>(inverse_root)};
    const RmsNormGrads grads{at<float>(grad_out), at<float>(grad_x), at<float>(grad_weight)};
    py::gil_scoped_release release;
    cpu::rms_norm_backward(args, grads, threads);
  });
  m.def("swiglu_cpu", [](uintptr_t gate, uintptr_t up, int64_t count, uintptr_t out, int threads) {
    const SwigluArgs args{at<float>(gate), at<float>(up), count, at<float>(out)};
    py::gil_scoped_release release;
    cpu::swiglu(args, threads);
  });
  m.def("swiglu_backward_cpu", [](uintptr_t gate, uintptr_t up, int64_t count, uintptr_t grad_out, uintptr_t grad_gate,
                                  uintptr_t grad_up, int threads) {
    const SwigluArgs args{at<float>(gate), at<float>(up), count, nullptr};
    const SwigluGrads grads{at<float>(grad_out), at<float>(grad_gate), at<float>(grad_up)};
    py::gil_scoped_release release;
    cpu::swiglu_backward(args, grads, threads);
  });
#endif

#ifdef FASTRL_WITH_CUDA
  m.attr("CUDA") = true;
  m.def("group_advantage_cuda", [](uintptr_t rewards, uintptr_t cu, int64_t groups, bool divide_by_std,
                                   bool leave_one_out, int ddof, double eps, uintptr_t out, uintptr_t dead,
                                   uintptr_t stream) {
    const NvtxRange range{"group_advantage"};
    const auto args = group_advantage_args(rewards, cu, groups, divide_by_std, leave_one_out, ddof, eps, out, dead);
    check_cuda("group_advantage", cuda::group_advantage(args, at<void>(stream)));
  });

  m.def("logit_fold_cuda", [](uintptr_t logits, int64_t rows, int64_t cols, int64_t stride, int64_t vocab_begin,
                              uintptr_t targets, float scale, uintptr_t row_max, uintptr_t sum_exp, uintptr_t sum_dexp,
                              uintptr_t target_logit, uintptr_t stream) {
    const NvtxRange range{"logit_fold"};
    const LogitFoldArgs args{logit_slab(rows, cols, stride, vocab_begin, targets, scale),
                             at<float>(logits),
                             at<float>(row_max),
                             at<float>(sum_exp),
                             at<float>(sum_dexp),
                             at<float>(target_logit)};
    check_cuda("logit_fold", cuda::logit_fold(args, at<void>(stream)));
  });

  m.def("logit_grad_cuda", [](uintptr_t logits, int64_t rows, int64_t cols, int64_t stride, int64_t vocab_begin,
                              uintptr_t targets, float scale, uintptr_t row_max, uintptr_t log_sum, uintptr_t entropy,
                              uintptr_t grad_logprobs, uintptr_t grad_entropy, uintptr_t grad_bf16, uintptr_t stream) {
    const NvtxRange range{"logit_grad"};
    const LogitGradArgs args{logit_slab(rows, cols, stride, vocab_begin, targets, scale),
                             at<float>(logits),
                             at<float>(row_max),
                             at<float>(log_sum),
                             at<float>(entropy),
                             at<float>(grad_logprobs),
                             at<float>(grad_entropy)};
    check_cuda("logit_grad", cuda::logit_grad(args, at<void>(grad_bf16), at<void>(stream)));
  });

  m.def("gradient_sketch_cuda", [](uintptr_t token_ids, uintptr_t logprobs, int64_t, uintptr_t cu_seqlens,
                                   int64_t rollouts, int64_t width, int64_t seed, uintptr_t sketch, uintptr_t stream) {
    const NvtxRange range{"gradient_sketch"};
    const GradientSketchArgs args{
        at<int64_t>(token_ids), at<float>(logprobs), at<int64_t>(cu_seqlens), rollouts, width, seed, at<float>(sketch)};
    check_cuda("gradient_sketch", cuda::gradient_sketch(args, at<void>(stream)));
  });

  m.def("choose_rollouts_workspace", [](int rule, int64_t rollouts, int64_t groups, int64_t width, int64_t k) {
    return cuda::choose_rollouts_workspace(static_cast<ChooseRule>(rule), rollouts, groups, width, k);
  });
  m.def("choose_rollouts_cuda", [](uintptr_t vectors, uintptr_t advantages, int64_t rollouts, uintptr_t cu_group_sizes,
                                   int64_t groups, int64_t width, int rule, int64_t k, int64_t seed, uintptr_t weights,
                                   uintptr_t order, uintptr_t fidelity, uintptr_t workspace, uintptr_t stream) {
    const NvtxRange range{"choose_rollouts"};
    const auto args = choose_rollouts_args(vectors, advantages, cu_group_sizes, groups, width, rule, k, seed, weights,
                                           order, fidelity);
    check_cuda("choose_rollouts", cuda::choose_rollouts(args, rollouts, at<double>(workspace), at<void>(stream)));
  });

  m.def("policy_loss_cuda",
        [](bool is_double, int64_t, uintptr_t logprobs, uintptr_t old, uintptr_t ref, uintptr_t rollout,
           uintptr_t advantages, uintptr_t weights, uintptr_t token_weights, uintptr_t cu_targets, int64_t sequences,
           int ratio, int clip, int kl, double clip_low, double clip_high, double dual_clip, double kl_coef,
           uintptr_t partial, uintptr_t grad, uintptr_t loss, uintptr_t stats, uintptr_t stream) {
          const NvtxRange range{"policy_loss"};
          const auto run = [&](auto real) {
            const auto args = policy_loss_args<decltype(real)>(
                logprobs, old, ref, rollout, advantages, weights, token_weights, cu_targets, sequences, ratio, clip, kl,
                clip_low, clip_high, dual_clip, kl_coef, partial, grad, loss, stats);
            check_cuda("policy_loss", cuda::policy_loss(args, at<void>(stream)));
          };
          is_double ? run(double{}) : run(float{});
        });

  m.def("select_diverse_workspace", &cuda::select_diverse_workspace);
  m.def("select_diverse_cuda", [](uintptr_t token_ids, int64_t tokens, uintptr_t cu_seqlens, uintptr_t cu_group_sizes,
                                  int64_t groups, uintptr_t classes, int64_t tau_millionths, int ngram, bool seed_only,
                                  uintptr_t workspace, uintptr_t kept, uintptr_t representative, uintptr_t stream) {
    const NvtxRange range{"select_diverse"};
    check(tokens < (int64_t{1} << 30), "token_ids must be fewer than 2^30, not " + std::to_string(tokens));
    const auto args = select_diverse_args(token_ids, cu_seqlens, cu_group_sizes, groups, classes, tau_millionths, ngram,
                                          seed_only, kept, representative);
    check_cuda("select_diverse", cuda::select_diverse(args, tokens, at<int>(workspace), at<void>(stream)));
  });
#else
  m.attr("CUDA") = false;
#endif
}
