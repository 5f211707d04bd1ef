#include "kernels/choose_rollouts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/parallel.h"
#include "kernels/gradient_sketch.h"

namespace fastrl::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double dot(const float* a, const float* b, int64_t n) {
  return lane_sum(n, [=](int64_t i) { return static_cast<double>(a[i]) * static_cast<double>(b[i]); });
}

// The members of one group: inner products of their vectors, and the choice.
class Group {
 public:
  Group(const ChooseRolloutsArgs& args, int64_t g)
      : args_(args),
        begin_(args.cu_group_sizes[g]),
        n_(args.cu_group_sizes[g + 1] - begin_),
        eligible_(static_cast<size_t>(n_)),
        products_(static_cast<size_t>(n_ * n_)) {
    for (int64_t i = 0; i < n_; ++i) {
      const float* v = vector(i);
      eligible_[i] =
          std::isfinite(advantage(i)) && std::all_of(v, v + args.width, [](float x) { return std::isfinite(x); });
    }
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        const bool both = eligible_[i] && eligible_[j];
        products_[i * n_ + j] = products_[j * n_ + i] = both ? dot(vector(i), vector(j), args.width) : 0.0;
      }
    }
  }

  double run() {
    if (args_.rule == ChooseRule::given) {
      for (int64_t i = 0; i < n_; ++i) args_.order[begin_ + i] = -1;
      return fidelity();
    }
    for (int64_t i = 0; i < n_; ++i) {
      args_.weights[begin_ + i] = 0;
      args_.order[begin_ + i] = -1;
    }
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
  double product(int64_t i, int64_t j) const { return products_[i * n_ + j]; }
  double gram(int64_t i, int64_t j) const {
    return eligible_[i] && eligible_[j] ? (advantage(i) * advantage(j)) * product(i, j) : 0.0;
  }
  bool kept(int64_t i) const { return args_.order[begin_ + i] >= 0; }

  double similarity(int64_t i, int64_t j) const {
    const double sizes = std::sqrt(product(i, i)) * std::sqrt(product(j, j)), sign = advantage(i) * advantage(j);
    if (sizes == 0 || sign == 0) return 0;
    const double c = std::min(1.0, std::max(-1.0, product(i, j) / sizes));
    return sign > 0 ? c : -c;
  }

  void keep(int64_t i) {
    args_.order[begin_ + i] = kept_count_++;
    args_.weights[begin_ + i] = 1;
  }

  // The member not kept yet with the largest score; -1 where all scores are -inf.
  template <class Score>
  int64_t best(const Score& score) const {
    int64_t winner = -1;
    double most = -kInfinity;
    for (int64_t i = 0; i < n_; ++i) {
      if (!eligible_[i] || kept(i)) continue;
      const double s = score(i);
      if (s > most) {
        most = s;
        winner = i;
      }
    }
    return winner;
  }

  void maxmin() {
    std::vector<double> nearest(static_cast<size_t>(n_), -2.0);  // largest similarity to a kept member
    while (kept_count_ < args_.k) {
      const int64_t i = best([&](int64_t j) {
        if (gram(j, j) == 0) return -std::numeric_limits<double>::max();
        return kept_count_ == 0 ? gram(j, j) : -nearest[j];
      });
      if (i < 0) return;
      keep(i);
      for (int64_t j = 0; j < n_; ++j) nearest[j] = std::max(nearest[j], similarity(i, j));
    }
  }

  void dpp() {
    const auto quality = [&](int64_t i) { return std::abs(advantage(i)); };
    std::vector<double> left(static_cast<size_t>(n_));  // what of L_ii the kept members do not explain
    std::vector<std::vector<double>> rows;              // of the Cholesky factor, one per kept member
    double scale = 0;
    for (int64_t i = 0; i < n_; ++i) {
      left[i] = eligible_[i] && product(i, i) > 0 ? quality(i) * quality(i) : 0.0;
      scale = std::max(scale, left[i]);
    }
    while (kept_count_ < args_.k) {
      const int64_t i = best([&](int64_t j) { return left[j]; });
      if (i < 0 || !(left[i] > 1e-10 * scale)) return;
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
      const int64_t i = best([&](int64_t j) {
        if (args_.rule == ChooseRule::top_advantage) return std::abs(advantage(j));
        // the upper 53 bits, which a double holds exactly
        return -static_cast<double>(mix_bits(seed + static_cast<uint64_t>(begin_ + j)) >> 11);
      });
      if (i < 0) return;
      keep(i);
    }
  }

  // Solve G_PP s = G_P . 1 by Cholesky; false where G_PP is singular to rounding.
  bool solve(const std::vector<int64_t>& members, const std::vector<double>& target, std::vector<double>& s) const {
    const size_t m = members.size();
    std::vector<double> factor(m * m);
    for (size_t i = 0; i < m; ++i) {
      for (size_t j = 0; j <= i; ++j) {
        double rest = gram(members[i], members[j]);
        for (size_t l = 0; l < j; ++l) rest -= factor[i * m + l] * factor[j * m + l];
        if (i != j) {
          factor[i * m + j] = rest / factor[j * m + j];
        } else if (rest > 1e-10 * gram(members[i], members[i])) {
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
    std::vector<double> target(static_cast<size_t>(n_)), x(static_cast<size_t>(n_));
    double size = 0;  // |sum g|^2
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t j = 0; j < n_; ++j) target[i] += gram(i, j);
      size += target[i];
    }
    std::vector<bool> refused(static_cast<size_t>(n_));  // tried since the last success, and of no use
    std::vector<int64_t> members;                        // with a positive weight, in the order they came
    for (int64_t turn = 0; turn < 3 * n_ && static_cast<int64_t>(members.size()) < args_.k; ++turn) {
      int64_t next = -1;
      double most = 1e-9 * std::sqrt(std::max(size, 0.0));
      for (int64_t i = 0; i < n_; ++i) {
        if (refused[i] || x[i] > 0 || !(gram(i, i) > 0)) continue;
        double pull = target[i];
        for (const int64_t j : members) pull -= gram(i, j) * x[j];
        pull /= std::sqrt(gram(i, i));
        if (pull > most) {
          most = pull;
          next = i;
        }
      }
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
        const bool leaves = s[i] <= 0 && y[m] / (y[m] - s[i]) <= step;
        y[m] = leaves ? 0.0 : y[m] + step * (s[i] - y[m]);
        if (!leaves) stay.push_back(m);
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
    double all = 0, part = 0, both = 0;
    for (int64_t i = 0; i < n_; ++i) {
      const double wi = eligible_[i] ? args_.weights[begin_ + i] : 0.0;
      for (int64_t j = 0; j < n_; ++j) {
        const double wj = eligible_[j] ? args_.weights[begin_ + j] : 0.0, g = gram(i, j);
        all += g;
        both += g * wj;
        part += wi * g * wj;
      }
    }
    // a sum that cancels to nothing leaves rounding, which is no direction
    double sizes = 0, weighted = 0;
    for (int64_t i = 0; i < n_; ++i) {
      const double wi = eligible_[i] ? args_.weights[begin_ + i] : 0.0;
      sizes += gram(i, i);
      weighted += wi * wi * gram(i, i);
    }
    const bool no_sum = !(all > 1e-12 * sizes), no_part = !(part > 1e-12 * weighted);
    if (no_sum || no_part) return no_sum && no_part ? 1 : 0;
    return std::min(1.0, std::max(-1.0, both / (std::sqrt(all) * std::sqrt(part))));
  }

  const ChooseRolloutsArgs& args_;
  const int64_t begin_, n_;
  std::vector<char> eligible_;
  std::vector<double> products_;  // [n, n] <v_i, v_j>
  int64_t kept_count_ = 0;
};

}  // namespace

void choose_rollouts(const ChooseRolloutsArgs& args, int num_threads) {
  const int64_t rollouts = args.cu_group_sizes[args.groups];
  const int threads = threads_for(rollouts * args.width * 4, num_threads);
  parallel_for(args.groups, threads, [&](int64_t g) { args.fidelity[g] = Group(args, g).run(); });
}

}  // namespace fastrl::cpu
