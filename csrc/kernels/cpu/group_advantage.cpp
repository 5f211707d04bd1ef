#include "kernels/group_advantage.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/parallel.h"

namespace fastrl::cpu {
namespace {

// So many groups go through each step together: the divisions and the root of one wait for nothing of another.
constexpr int64_t kBlock = 32;

struct Group {
  const double* rewards;
  int64_t count;
  double n, mean;       // graded members
  double rest, square;  // sum (r - mean) and sum (r - mean)^2 over them
};

// Two passes are as exact as Welford's one, and have no chain of divisions; `rest` is what the rounding of the mean has
// left over. Most groups have no ungraded member, and then nothing need be masked.
template <bool kAllGraded>
double if_graded(double reward, double x) {
  return kAllGraded || reward == reward ? x : 0.0;
}

template <bool kAllGraded>
void add_up(Group& g) {
  const double* r = g.rewards;
  const auto one = [r](int64_t i) { return if_graded<false>(r[i], 1.0); };
  g.n = kAllGraded ? static_cast<double>(g.count) : lane_sum(g.count, one);
  g.mean = lane_sum(g.count, [r](int64_t i) { return if_graded<kAllGraded>(r[i], r[i]); }) / g.n;
}

template <bool kAllGraded>
void add_squares(Group& g) {
  const double *r = g.rewards, mean = g.mean;
  double rests[4] = {0, 0, 0, 0}, squares[4] = {0, 0, 0, 0};
  const auto add = [&](int64_t i, int k) {
    const double d = if_graded<kAllGraded>(r[i], r[i] - mean);
    rests[k] += d;
    squares[k] += d * d;
  };
  int64_t i = 0;
  for (; i + 4 <= g.count; i += 4) {
    for (int k = 0; k < 4; ++k) add(i + k, k);
  }
  for (int k = 0; i < g.count; ++i, ++k) add(i, k);
  g.rest = (rests[0] + rests[2]) + (rests[1] + rests[3]);
  g.square = (squares[0] + squares[2]) + (squares[1] + squares[3]);
}

bool is_dead(const Group& g) {
  if (g.n < 2) return true;
  // Equal rewards differ from their mean by its rounding at most: where some differ by more, none need be compared.
  const double rounding = g.n * 1e-15 * g.mean;
  if (g.square > g.n * rounding * rounding) return false;
  int64_t first = 0;
  while (std::isnan(g.rewards[first])) ++first;
  const double one = g.rewards[first];
  return std::all_of(g.rewards, g.rewards + g.count, [one](double r) { return r == one || std::isnan(r); });
}

double factor_of(const Group& g, const GroupAdvantageArgs& args) {
  if (args.leave_one_out) return g.n / (g.n - 1);
  if (!args.divide_by_std) return 1;
  const double m2 = g.square - g.rest * g.rest / g.n;
  return 1 / (std::sqrt(m2 / (g.n - args.ddof)) + args.eps);
}

void write(const Group& g, double factor, bool dead, float* advantages) {
  if (dead) {
    std::fill_n(advantages, g.count, 0.0f);
  } else if (g.n == g.count) {
    for (int64_t i = 0; i < g.count; ++i) advantages[i] = static_cast<float>((g.rewards[i] - g.mean) * factor);
  } else {
    for (int64_t i = 0; i < g.count; ++i) {
      const double r = g.rewards[i];
      advantages[i] = static_cast<float>(r == r ? (r - g.mean) * factor : 0.0);
    }
  }
}

// Returns whether all rewards are finite or NaN.
bool one_block(const GroupAdvantageArgs& args, int64_t first, int64_t size) {
  const int64_t* cu = args.cu_group_sizes + first;
  Group groups[kBlock];
  bool finite = true;
  for (int64_t k = 0; k < size; ++k) {
    groups[k].rewards = args.rewards + cu[k];
    groups[k].count = cu[k + 1] - cu[k];
    add_up<true>(groups[k]);
  }
  for (int64_t k = 0; k < size; ++k) {
    Group& g = groups[k];
    if (std::isfinite(g.mean)) {
      add_squares<true>(g);
    } else {
      finite &= std::none_of(g.rewards, g.rewards + g.count, [](double r) { return std::isinf(r); });
      add_up<false>(g);
      add_squares<false>(g);
    }
  }
  double factors[kBlock];
  for (int64_t k = 0; k < size; ++k) factors[k] = factor_of(groups[k], args);
  for (int64_t k = 0; k < size; ++k) {
    const bool dead = args.dead[first + k] = is_dead(groups[k]);
    write(groups[k], factors[k], dead, args.advantages + cu[k]);
  }
  return finite;
}

}  // namespace

bool group_advantage(const GroupAdvantageArgs& args, int num_threads) {
  // a reward is read four times, from the nearest cache: waking a thread takes as long as some 50000 of them
  const int threads = threads_for(2 * args.cu_group_sizes[args.groups], num_threads);
  std::atomic<bool> finite{true};
  parallel_for((args.groups + kBlock - 1) / kBlock, threads, [&](int64_t block) {
    const int64_t first = block * kBlock;
    if (!one_block(args, first, std::min(kBlock, args.groups - first))) finite = false;
  });
  return finite;
}

}  // namespace fastrl::cpu
