// One block of sequences of policy_loss, compiled twice: for any processor and for AVX2, to the same bits. All of it is
// in an anonymous namespace, for the reason in simd.h; so are the functions that lanes.h is given.
//
// Tokens are walked in tiles, one plain loop per step, so that the compiler makes vector code of every loop.
#pragma once
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/lanes.h"
#include "kernels/policy_loss.h"

namespace fastrl::cpu {
namespace {

constexpr int64_t kTile = 256;
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
static_assert(sizeof(Sums) == sizeof(double) * (1 + kPolicyLossStats), "the workspace holds Sums back to back");

template <class Real>
struct Exponential {
  Real value, minus_one, minus_line;  // e^x, e^x - 1, e^x - 1 - x, each exact to its own size
};

inline Exponential<double> exponential(double x) {
  const double above = std::expm1(x);
  const double line = std::abs(x) < 1e-3 ? x * x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120)))) : above - x;
  return {std::exp(x), above, line};
}

// For |x| <= 20: x = n ln 2 + r with |r| <= ln 2 / 2, and the series of e^r without its first two terms. Adding 1.5
// 2^23 rounds to an integer and leaves it in the low bits, so NaN passes without a conversion to int.
inline Exponential<float> exponential(float x) {
  const float magic = 12582912.0f, shifted = x * 1.44269504f + magic, n = shifted - magic;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4b400000u + 127u) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float q = 1.0f / 40320;
  q = q * r + 1.0f / 5040;
  q = q * r + 1.0f / 720;
  q = q * r + 1.0f / 120;
  q = q * r + 1.0f / 24;
  q = q * r + 1.0f / 6;
  q = q * r + 0.5f;
  const float above_line = q * r * r, value = power * (1.0f + (r + above_line));
  const bool small = n == 0;
  return {value, small ? r + above_line : value - 1.0f, small ? above_line : (value - 1.0f) - x};
}

template <class Real>
class Sequence {
 public:
  Sequence(const PolicyLossArgs<Real>& args, int64_t q, Sums& sums)
      : args_(args),
        end_(args.cu_targets[q + 1]),
        advantage_(args.advantages[q]),
        sequence_weight_(args.weights[q]),
        low_(static_cast<Real>(1 - args.clip_low)),
        high_(static_cast<Real>(1 + args.clip_high)),
        dual_(static_cast<Real>(args.dual_clip)),
        ppo_(args.clip == ClipKind::ppo),
        sums_(sums) {
    const int64_t begin = args.cu_targets[q];
    if (args.ratio != RatioKind::token) gather(begin);
    for (int64_t at = begin; at < end_; at += kTile) tile(at);
  }

 private:
  // The one ratio of all tokens, and the mean weight: of a common ratio every token has an equal share.
  void gather(int64_t begin) {
    double log_ratios = 0, weights = 0, length = 0;
    for (int64_t at = begin; at < end_; at += kTile) {
      load(at);
      log_ratios += lane_sum(n_, [&](int64_t i) { return static_cast<double>(log_ratio_[i]); });
      weights += lane_sum(n_, [&](int64_t i) { return static_cast<double>(weight_[i]); });
      length += lane_sum(n_, [&](int64_t i) { return static_cast<double>(weight_[i] != 0); });
    }
    common_ratio_ = static_cast<Real>(std::exp(length > 0 ? log_ratios / length : 0.0));
    share_ = static_cast<Real>(weights / length);
  }

  void tile(int64_t at) {
    load(at);
    if (args_.ratio == RatioKind::token) {
      for (int64_t i = 0; i < n_; ++i) ratio_[i] = exponential(log_ratio_[i]).value;
    } else {
      for (int64_t i = 0; i < n_; ++i) ratio_[i] = common_ratio_;
    }
    if (args_.ratio == RatioKind::sequence && ppo_) {
      for (int64_t i = 0; i < n_; ++i) grad_[i] = weight_[i] != 0 ? inside_[i] * share_ : Real(0);
    } else if (args_.ratio == RatioKind::token && ppo_) {  // outside the cut the ratio is constant
      for (int64_t i = 0; i < n_; ++i) grad_[i] = inside_[i] * weight_[i];
    } else {
      for (int64_t i = 0; i < n_; ++i) grad_[i] = weight_[i];
    }
    policy_terms();
    if (args_.ref_logprobs != nullptr) kl_terms(at);
    std::memcpy(args_.grad + at, grad_, static_cast<size_t>(n_) * sizeof(Real));
    count(at);
  }

  // Weights, logprobs and cut log ratios of a tile; all numbers of a masked token become 0.
  void load(int64_t at) {
    n_ = end_ - at < kTile ? end_ - at : kTile;
    const Real* factors = args_.token_weights ? args_.token_weights + at : nullptr;
    for (int64_t i = 0; i < n_; ++i) weight_[i] = factors ? sequence_weight_ * factors[i] : sequence_weight_;
    const Real* logprobs = args_.logprobs + at;
    for (int64_t i = 0; i < n_; ++i) {
      const Real x = logprobs[i];
      logprob_[i] = weight_[i] != 0 ? x : Real(0);
    }
    if (args_.old_logprobs == nullptr) {
      for (int64_t i = 0; i < n_; ++i) {
        log_ratio_[i] = 0;
        inside_[i] = 1;
      }
    } else {
      difference(args_.old_logprobs + at, log_ratio_);
    }
  }

  // logprob - other cut to [-20, 20], and whether it was inside.
  void difference(const Real* other, Real* d) {
    constexpr Real kMost = 20;
    for (int64_t i = 0; i < n_; ++i) {
      const Real difference = logprob_[i] - other[i], x = weight_[i] != 0 ? difference : Real(0);
      const Real below = x > kMost ? kMost : x;
      d[i] = below < -kMost ? -kMost : below;
      inside_[i] = std::abs(x) > kMost ? Real(0) : Real(1);
    }
  }

  // value_ becomes the policy term of each token, grad_ is multiplied by its slope along the log ratio.
  void policy_terms() {
    const Real a = advantage_;
    if (a == 0) {
      for (int64_t i = 0; i < n_; ++i) value_[i] = grad_[i] = 0;
      return;
    }
    const Real low = low_, high = high_;
    const auto clip = [low, high](Real r) {
      const Real raised = r < low ? low : r;
      return raised > high ? high : raised;
    };
    if (!ppo_) {
      for (int64_t i = 0; i < n_; ++i) {
        const Real slope = -a * clip(ratio_[i]);
        value_[i] = slope * logprob_[i];
        grad_[i] *= slope;
      }
      return;
    }
    for (int64_t i = 0; i < n_; ++i) {
      const Real whole = -a * ratio_[i], cut = -a * clip(ratio_[i]);
      const bool is_cut = cut > whole;
      value_[i] = is_cut ? cut : whole;
      grad_[i] *= is_cut ? Real(0) : whole;
    }
    if (!(a < 0)) return;
    const Real dual = dual_, most = -a * dual;
    for (int64_t i = 0; i < n_; ++i) {
      const bool over = ratio_[i] > dual;
      value_[i] = over ? most : value_[i];
      grad_[i] = over ? Real(0) : grad_[i];
    }
  }

  void kl_terms(int64_t at) {
    difference(args_.ref_logprobs + at, kl_);
    const Real coef = static_cast<Real>(args_.kl_coef);
    const auto add = [this, coef](int64_t i, Real value, Real slope) {
      kl_[i] = value;
      value_[i] += coef * value;
      grad_[i] += weight_[i] * inside_[i] * (coef * slope);
    };
    if (args_.kl == KlKind::k1) {
      for (int64_t i = 0; i < n_; ++i) add(i, kl_[i], 1);
    } else if (args_.kl == KlKind::k2) {
      for (int64_t i = 0; i < n_; ++i) add(i, kl_[i] * kl_[i] / 2, kl_[i]);
    } else {
      for (int64_t i = 0; i < n_; ++i) {
        const Exponential<Real> e = exponential(-kl_[i]);
        add(i, e.minus_line, -e.minus_one);
      }
    }
    sums_.stats[kKlSum] += lane_sum(n_, [&](int64_t i) { return static_cast<double>(kl_[i]); });
  }

  void count(int64_t at) {
    double* stats = sums_.stats;
    const Real low = low_, high = high_, most_dual = dual_;
    int live = 0, below = 0, above = 0, dual = 0;
    for (int64_t i = 0; i < n_; ++i) {
      const int is_live = weight_[i] != 0;
      live += is_live;
      below += is_live & (ratio_[i] < low);
      above += is_live & (ratio_[i] > high);
      dual += is_live & (ratio_[i] > most_dual);
    }
    for (int64_t i = 0; i < n_; ++i) value_[i] = weight_[i] != 0 ? value_[i] : Real(0);
    sums_.loss +=
        lane_sum(n_, [&](int64_t i) { return static_cast<double>(weight_[i]) * static_cast<double>(value_[i]); });
    stats[kTokens] += live;
    if (advantage_ < 0) stats[kClippedLow] += below;
    if (advantage_ > 0) stats[kClippedHigh] += above;
    if (advantage_ < 0 && ppo_) stats[kClippedDual] += dual;
    stats[kRatioSum] += live_sum(ratio_);
    stats[kRatioMax] = std::fmax(stats[kRatioMax], live_max(ratio_, 1));
    stats[kRatioMin] = std::fmin(stats[kRatioMin], -live_max(ratio_, -1));
    if (args_.rollout_logprobs == nullptr) return;
    const Real* rollout = args_.rollout_logprobs + at;
    for (int64_t i = 0; i < n_; ++i) gap_[i] = std::abs(logprob_[i] - rollout[i]);
    stats[kGapSum] += live_sum(gap_);
    stats[kGapMax] = std::fmax(stats[kGapMax], live_max(gap_, 1));
  }

  // Masked numbers are taken out in loops of their own: a choice inside a reduction keeps it from being vector code.
  double live_sum(const Real* numbers) {
    for (int64_t i = 0; i < n_; ++i) live_[i] = weight_[i] != 0 ? numbers[i] : Real(0);
    return lane_sum(n_, [this](int64_t i) { return static_cast<double>(live_[i]); });
  }

  // The largest of sign * numbers; NaN is passed over.
  double live_max(const Real* numbers, Real sign) {
    constexpr Real kLowest = -std::numeric_limits<Real>::infinity();
    for (int64_t i = 0; i < n_; ++i) {
      const Real mine = sign * numbers[i];
      const bool counts = (weight_[i] != 0) & (mine > kLowest);
      live_[i] = counts ? mine : kLowest;
    }
    for (int64_t n = n_, half; n > 1; n = half) {  // halves folded onto each other are vector code as well
      half = (n + 1) / 2;
      for (int64_t i = 0; i < n - half; ++i) {
        const Real x = live_[i], y = live_[i + half];
        live_[i] = y > x ? y : x;
      }
    }
    return live_[0];
  }

  const PolicyLossArgs<Real>& args_;
  const int64_t end_;
  const Real advantage_, sequence_weight_, low_, high_, dual_;
  const bool ppo_;
  Sums& sums_;
  Real common_ratio_ = 1, share_ = 0;
  int64_t n_ = 0;
  Real weight_[kTile], logprob_[kTile], log_ratio_[kTile], inside_[kTile], ratio_[kTile], value_[kTile], grad_[kTile],
      kl_[kTile], gap_[kTile], live_[kTile];
};

template <class Real>
void sum_block(const PolicyLossArgs<Real>& args, int64_t block) {
  Sums sums;
  const int64_t last = (block + 1) * kPolicyLossBlock;
  for (int64_t q = block * kPolicyLossBlock; q < last && q < args.sequences; ++q) {
    Sums of_sequence;
    Sequence<Real>(args, q, of_sequence);
    sums.add(of_sequence);
  }
  reinterpret_cast<Sums*>(args.partial)[block] = sums;
}

}  // namespace
}  // namespace fastrl::cpu
