#include "kernels/choose_rollouts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "kernels/gradient_sketch.h"

namespace fastrl::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class A, class B>
double dot(const A* a, const B* b, int64_t n) {
  double sums[kProductSums] = {};
  int64_t i = 0;
  for (; i + kProductSums <= n; i += kProductSums) {
    for (int k = 0; k < kProductSums; ++k) sums[k] += static_cast<double>(a[i + k]) * static_cast<double>(b[i + k]);
  }
  for (int k = 0; i < n; ++i, ++k) sums[k] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  for (int apart = kProductSums / 2; apart > 0; apart /= 2) {
    for (int k = 0; k < apart; ++k) sums[k] += sums[k + apart];
  }
  return sums[0];
}

// The members of one group, and the choice among them.
class Group {
 public:
  Group(const ChooseRolloutsArgs& args, int64_t g)
      : args_(args),
        begin_(args.cu_group_sizes[g]),
        n_(args.cu_group_sizes[g + 1] - begin_),
        squares_(static_cast<size_t>(n_)),
        eligible_(static_cast<size_t>(n_)) {
    for (int64_t i = 0; i < n_; ++i) {
      squares_[i] = dot(vector(i), vector(i), args.width);  // finite only where the whole vector is
      eligible_[i] = std::isfinite(advantage(i)) && std::isfinite(squares_[i]);
    }
    whole_ = sum([](int64_t) { return 1.0; });
  }

  double run() {
    if (args_.rule == ChooseRule::given) {
      std::fill_n(args_.order + begin_, n_, -1);
      return fidelity();
    }
    std::fill_n(args_.weights + begin_, n_, 0.0f);
    std::fill_n(args_.order + begin_, n_, -1);
    if (args_.rule == ChooseRule::match) {
      match();
    } else if (args_.rule == ChooseRule::dpp) {
      dpp();
    } else if (args_.rule == ChooseRule::maxmin) {
      maxmin();
    } else {
      by_key();
    }
    return fidelity();
  }

 private:
  const float* vector(int64_t i) const { return args_.vectors + (begin_ + i) * args_.width; }
  double advantage(int64_t i) const { return args_.advantages[begin_ + i]; }
  double gram(int64_t i) const { return advantage(i) * advantage(i) * squares_[i]; }  // G_ii
  bool kept(int64_t i) const { return args_.order[begin_ + i] >= 0; }

  double similarity(int64_t i, int64_t j) const {
    return similarity_of(dot(vector(i), vector(j), args_.width), squares_[i], squares_[j], advantage(i) * advantage(j));
  }

  // sum over the eligible members of weight(i) g_i; a member of weight 0 is not read.
  template <class Weight>
  std::vector<double> sum(const Weight& weight) const {
    std::vector<double> total(static_cast<size_t>(args_.width));
    for (int64_t i = 0; i < n_; ++i) {
      const double factor = weight(i) * advantage(i);
      if (!eligible_[i] || factor == 0) continue;
      const float* v = vector(i);
      for (int64_t c = 0; c < args_.width; ++c) total[c] += factor * v[c];
    }
    return total;
  }

  void keep(int64_t i) {
    args_.order[begin_ + i] = kept_count_++;
    args_.weights[begin_ + i] = 1;
  }

  // The member not kept yet with the largest score, if that is above `least`; else -1.
  template <class Score>
  int64_t best(double least, const Score& score) const {
    int64_t winner = -1;
    for (int64_t i = 0; i < n_; ++i) {
      if (!eligible_[i] || kept(i)) continue;
      const double s = score(i);
      if (s > least) {
        least = s;
        winner = i;
      }
    }
    return winner;
  }

  void maxmin() {
    std::vector<double> nearest(static_cast<size_t>(n_), -2.0);  // largest similarity to a kept member
    while (kept_count_ < args_.k) {
      const int64_t i = best(-kInfinity, [&](int64_t j) {
        if (gram(j) == 0) return -std::numeric_limits<double>::max();
        return kept_count_ == 0 ? gram(j) : -nearest[j];
      });
      if (i < 0) return;
      keep(i);
      for (int64_t j = 0; j < n_; ++j) {
        if (eligible_[j] && !kept(j)) nearest[j] = std::max(nearest[j], similarity(i, j));
      }
    }
  }

  void dpp() {
    const auto quality = [&](int64_t i) { return std::abs(advantage(i)); };
    std::vector<double> left(static_cast<size_t>(n_));  // what of L_ii the kept members do not explain
    std::vector<std::vector<double>> rows;              // of the Cholesky factor, one per kept member
    double scale = 0;
    for (int64_t i = 0; i < n_; ++i) left[i] = squares_[i] > 0 ? quality(i) * quality(i) : 0.0;
    while (kept_count_ < args_.k) {
      const int64_t i = best(1e-10 * scale, [&](int64_t j) { return left[j]; });
      if (i < 0) return;
      if (kept_count_ == 0) scale = left[i];
      std::vector<double> row(static_cast<size_t>(n_));
      const double pivot = std::sqrt(left[i]);
      for (int64_t j = 0; j < n_; ++j) {
        if (!eligible_[j] || kept(j) || j == i) continue;
        double rest = quality(i) * quality(j) * similarity(i, j);
        for (const auto& earlier : rows) rest -= earlier[i] * earlier[j];
        row[j] = rest / pivot;
        left[j] -= row[j] * row[j];
      }
      rows.push_back(std::move(row));
      keep(i);
    }
  }

  void by_key() {
    const uint64_t seed = mix_bits(static_cast<uint64_t>(args_.seed));
    while (kept_count_ < args_.k) {
      const int64_t i = best(-kInfinity, [&](int64_t j) {
        if (args_.rule == ChooseRule::top_advantage) return std::abs(advantage(j));
        // the upper 53 bits, which a double holds exactly
        return -static_cast<double>(mix_bits(seed + static_cast<uint64_t>(begin_ + j)) >> 11);
      });
      if (i < 0) return;
      keep(i);
    }
  }

  // Row i of G, made when it is first asked for.
  const std::vector<double>& gram_row(int64_t i) {
    std::vector<double>& row = rows_[i];
    if (row.empty()) {
      row.assign(static_cast<size_t>(n_), 0.0);
      for (int64_t j = 0; j < n_; ++j) {
        if (eligible_[j]) row[j] = advantage(i) * advantage(j) * dot(vector(i), vector(j), args_.width);
      }
    }
    return row;
  }

  // Solve G_PP s = G_P . 1 by Cholesky; false where G_PP is singular to rounding.
  bool solve(const std::vector<int64_t>& members, const std::vector<double>& target, std::vector<double>& s) {
    const size_t m = members.size();
    std::vector<double> factor(m * m);
    for (size_t i = 0; i < m; ++i) {
      const std::vector<double>& row = gram_row(members[i]);
      for (size_t j = 0; j <= i; ++j) {
        double rest = row[members[j]];
        for (size_t l = 0; l < j; ++l) rest -= factor[i * m + l] * factor[j * m + l];
        if (i != j) {
          factor[i * m + j] = rest / factor[j * m + j];
        } else if (rest > 1e-10 * row[members[i]]) {
          factor[i * m + i] = std::sqrt(rest);
        } else {
          return false;
        }
      }
    }
    s.assign(m, 0.0);
    for (size_t i = 0; i < m; ++i) {
      double rest = target[members[i]];
      for (size_t l = 0; l < i; ++l) rest -= factor[i * m + l] * s[l];
      s[i] = rest / factor[i * m + i];
    }
    for (size_t i = m; i-- > 0;) {
      double rest = s[i];
      for (size_t l = i + 1; l < m; ++l) rest -= factor[l * m + i] * s[l];
      s[i] = rest / factor[i * m + i];
    }
    return true;
  }

  void match() {
    rows_.resize(static_cast<size_t>(n_));
    std::vector<double> target(static_cast<size_t>(n_)), x(static_cast<size_t>(n_));
    for (int64_t i = 0; i < n_; ++i) target[i] = advantage(i) * dot(vector(i), whole_.data(), args_.width);
    const double least = 1e-9 * std::sqrt(dot(whole_.data(), whole_.data(), args_.width));
    std::vector<bool> refused(static_cast<size_t>(n_));  // tried since the last success, and of no use
    std::vector<int64_t> members;                        // with a positive weight, in the order they came
    for (int64_t turn = 0; turn < 3 * n_ && static_cast<int64_t>(members.size()) < args_.k; ++turn) {
      const int64_t next = best(least, [&](int64_t i) {
        if (refused[i] || x[i] > 0 || !(gram(i) > 0)) return -kInfinity;
        double pull = target[i];
        for (const int64_t j : members) pull -= gram_row(j)[i] * x[j];
        return pull / std::sqrt(gram(i));
      });
      if (next < 0) break;
      if (!enter(next, target, members, x)) {
        refused[next] = true;
        continue;
      }
      std::fill(refused.begin(), refused.end(), false);
    }
    for (const int64_t i : members) {
      keep(i);
      args_.weights[begin_ + i] = static_cast<float>(x[i]);
    }
  }

  // Lawson and Hanson's inner loop: take `next` in, and out whoever's weight would turn negative.
  bool enter(int64_t next, const std::vector<double>& target, std::vector<int64_t>& members, std::vector<double>& x) {
    std::vector<int64_t> passive = members;
    std::vector<double> y = x, s;
    passive.push_back(next);
    if (!solve(passive, target, s) || !(s.back() > 0)) return false;
    while (*std::min_element(s.begin(), s.end()) <= 0) {
      double step = 1;
      for (size_t i = 0; i < passive.size(); ++i) {
        if (s[i] <= 0) step = std::min(step, y[passive[i]] / (y[passive[i]] - s[i]));
      }
      std::vector<int64_t> stay;
      for (size_t i = 0; i < passive.size(); ++i) {
        const int64_t m = passive[i];
        if (s[i] <= 0 && y[m] / (y[m] - s[i]) <= step) continue;
        y[m] += step * (s[i] - y[m]);
        stay.push_back(m);
      }
      passive = std::move(stay);
      if (passive.empty() || !solve(passive, target, s)) return false;
    }
    std::fill(x.begin(), x.end(), 0.0);
    for (size_t i = 0; i < passive.size(); ++i) x[passive[i]] = s[i];
    members = std::move(passive);
    return true;
  }

  double fidelity() const {
    const auto weight = [this](int64_t i) { return static_cast<double>(args_.weights[begin_ + i]); };
    const std::vector<double> part = sum(weight);
    double sizes = 0, weighted = 0;
    for (int64_t i = 0; i < n_; ++i) {
      if (!eligible_[i]) continue;
      sizes += gram(i);
      weighted += weight(i) * weight(i) * gram(i);
    }
    const double *all = whole_.data(), *some = part.data();
    const int64_t width = args_.width;
    return fidelity_of(dot(all, all, width), dot(all, some, width), dot(some, some, width), sizes, weighted);
  }

  const ChooseRolloutsArgs& args_;
  const int64_t begin_, n_;
  std::vector<double> squares_;  // |v_i|^2
  std::vector<char> eligible_;
  std::vector<double> whole_;              // [width] sum of all g_i
  std::vector<std::vector<double>> rows_;  // of G, those that match has asked for
  int64_t kept_count_ = 0;
};

}  // namespace

void choose_rollouts(const ChooseRolloutsArgs& args, int num_threads) {
  const int64_t rollouts = args.cu_group_sizes[args.groups];
  const int threads = threads_for(rollouts * args.width * 4, num_threads);
  parallel_for(args.groups, threads, [&](int64_t g) { args.fidelity[g] = Group(args, g).run(); });
}

}  // namespace fastrl::cpu
