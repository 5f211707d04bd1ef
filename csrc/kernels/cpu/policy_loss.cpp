#include "kernels/policy_loss.h"

#include <cmath>
#include <limits>

#include "kernels/cpu/parallel.h"

namespace fastrl::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Sums {
  double loss = 0;
  double stats[kPolicyLossStats] = {0, 0, 0, 0, 0, kInfinity, -kInfinity, 0, 0, -kInfinity};

  void add(const Sums& other) {
    loss += other.loss;
    for (int i = 0; i < kPolicyLossStats; ++i) {
      if (i == kRatioMin) {
        stats[i] = other.stats[i] < stats[i] ? other.stats[i] : stats[i];
      } else if (i == kRatioMax || i == kGapMax) {
        stats[i] = other.stats[i] > stats[i] ? other.stats[i] : stats[i];
      } else {
        stats[i] += other.stats[i];
      }
    }
  }
};

template <class Real>
struct Cut {
  Real value;
  bool inside;  // else it is constant
};

template <class Real>
Cut<Real> cut(Real x) {
  constexpr Real kMost = 20;
  if (x > kMost) return {kMost, false};
  if (x < -kMost) return {-kMost, false};
  return {x, true};
}

// A token's or a sequence's policy term: its value and its slope along ln r, both without the weight.
template <class Real>
struct Term {
  Real value, slope;
};

template <class Real>
class Sequence {
 public:
  Sequence(const PolicyLossArgs<Real>& args, int64_t q)
      : args_(args),
        begin_(args.cu_targets[q]),
        end_(args.cu_targets[q + 1]),
        advantage_(args.advantages[q]),
        weight_(args.weights[q]) {}

  Sums run() {
    if (args_.ratio == RatioKind::token) {
      for (int64_t t = begin_; t < end_; ++t) {
        const Cut<Real> d = masked(t) ? Cut<Real>{0, false} : log_ratio(t);
        token(t, std::exp(d.value), d.inside || args_.clip == ClipKind::cispo ? weight(t) : Real(0));
      }
    } else {
      whole();
    }
    return sums_;
  }

 private:
  Real weight(int64_t t) const { return args_.token_weights ? weight_ * args_.token_weights[t] : weight_; }

  Cut<Real> log_ratio(int64_t t) const {
    if (args_.old_logprobs == nullptr) return {0, true};
    return cut(args_.logprobs[t] - args_.old_logprobs[t]);
  }

  bool masked(int64_t t) const { return weight(t) == 0; }

  // One ratio for all tokens, of which each may be a part: then its slope is that of all their terms together.
  void whole() {
    double log_ratios = 0, weights = 0, length = 0;
    for (int64_t t = begin_; t < end_; ++t) {
      if (masked(t)) continue;
      log_ratios += log_ratio(t).value;
      weights += weight(t);
      length += 1;
    }
    const Real ratio = static_cast<Real>(std::exp(length > 0 ? log_ratios / length : 0.0));
    const Real share = static_cast<Real>(weights / length);
    const bool own = args_.ratio == RatioKind::sequence_token || args_.clip == ClipKind::cispo;
    for (int64_t t = begin_; t < end_; ++t) {
      const bool inside = own || masked(t) || log_ratio(t).inside;
      token(t, ratio, own ? weight(t) : inside ? share : Real(0));
    }
  }

  Term<Real> policy_term(Real ratio, Real logprob) const {
    const Real a = advantage_;
    if (a == 0) return {0, 0};
    const Real low = static_cast<Real>(1 - args_.clip_low), high = static_cast<Real>(1 + args_.clip_high);
    const Real clipped = ratio < low ? low : ratio > high ? high : ratio;
    if (args_.clip == ClipKind::cispo) return {-clipped * a * logprob, -clipped * a};
    if (a < 0 && ratio > static_cast<Real>(args_.dual_clip)) return {-a * static_cast<Real>(args_.dual_clip), 0};
    if (-a * clipped > -a * ratio) return {-a * clipped, 0};
    return {-a * ratio, -a * ratio};
  }

  Term<Real> kl_term(int64_t t) const {
    const Cut<Real> d = cut(args_.logprobs[t] - args_.ref_logprobs[t]);
    const Real slope = d.inside ? Real(1) : Real(0);
    if (args_.kl == KlKind::k1) return {d.value, slope};
    if (args_.kl == KlKind::k2) return {d.value * d.value / 2, slope * d.value};
    const Real above = std::expm1(-d.value);
    return {above + d.value, -slope * above};
  }

  // `pull` is the weight of the policy term's slope in this token's gradient.
  void token(int64_t t, Real ratio, Real pull) {
    const Real w = weight(t);
    if (w == 0) {
      args_.grad[t] = 0;
      return;
    }
    const Real logprob = args_.logprobs[t];
    const Term<Real> term = policy_term(ratio, logprob);
    Real value = term.value, gradient = pull * term.slope;
    double* stats = sums_.stats;
    if (args_.ref_logprobs != nullptr) {
      const Term<Real> kl = kl_term(t);
      stats[kKlSum] += kl.value;
      value += static_cast<Real>(args_.kl_coef) * kl.value;
      gradient += w * static_cast<Real>(args_.kl_coef) * kl.slope;
    }
    args_.grad[t] = gradient;
    sums_.loss += static_cast<double>(w) * value;
    stats[kTokens] += 1;
    stats[kClippedLow] += advantage_ < 0 && ratio < static_cast<Real>(1 - args_.clip_low);
    stats[kClippedHigh] += advantage_ > 0 && ratio > static_cast<Real>(1 + args_.clip_high);
    stats[kClippedDual] += args_.clip == ClipKind::ppo && advantage_ < 0 && ratio > static_cast<Real>(args_.dual_clip);
    stats[kRatioSum] += ratio;
    if (ratio < stats[kRatioMin]) stats[kRatioMin] = ratio;
    if (ratio > stats[kRatioMax]) stats[kRatioMax] = ratio;
    if (args_.rollout_logprobs != nullptr) {
      const double gap = std::abs(logprob - args_.rollout_logprobs[t]);
      stats[kGapSum] += gap;
      if (gap > stats[kGapMax]) stats[kGapMax] = gap;
    }
  }

  const PolicyLossArgs<Real>& args_;
  const int64_t begin_, end_;
  const Real advantage_, weight_;
  Sums sums_;
};

}  // namespace

template <class Real>
void policy_loss(const PolicyLossArgs<Real>& args, int num_threads) {
  const int64_t blocks = (args.sequences + kPolicyLossBlock - 1) / kPolicyLossBlock;
  Sums* partial = reinterpret_cast<Sums*>(args.partial);
  static_assert(sizeof(Sums) == sizeof(double) * (1 + kPolicyLossStats), "the workspace holds Sums back to back");
  // a token costs about as much as ten elements of a plain loop
  const int threads = threads_for(10 * args.cu_targets[args.sequences], num_threads);
  parallel_for(blocks, threads, [&](int64_t b) {
    Sums sums;
    const int64_t last = (b + 1) * kPolicyLossBlock;
    for (int64_t q = b * kPolicyLossBlock; q < last && q < args.sequences; ++q) {
      sums.add(Sequence<Real>(args, q).run());
    }
    partial[b] = sums;
  });
  Sums total;
  for (int64_t b = 0; b < blocks; ++b) total.add(partial[b]);
  *args.loss = total.loss;
  for (int i = 0; i < kPolicyLossStats; ++i) args.stats[i] = total.stats[i];
}

template void policy_loss(const PolicyLossArgs<float>&, int);
template void policy_loss(const PolicyLossArgs<double>&, int);

}  // namespace fastrl::cpu
