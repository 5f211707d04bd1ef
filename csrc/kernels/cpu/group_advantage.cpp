#include "kernels/group_advantage.h"

#include <cmath>

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/parallel.h"

namespace fastrl::cpu {
namespace {

struct Moments {
  double n, mean, m2;  // how many, their mean, sum (r - mean)^2
  bool all_equal;
};

// Two passes are as exact as Welford's one, and have no chain of divisions; the second takes off what the rounding of
// the mean added. Most groups have no ungraded member, and then nothing need be masked.
template <bool kAllGraded>
Moments moments_of(const double* rewards, int64_t count) {
  const auto graded = [rewards](int64_t i, double x) { return kAllGraded || rewards[i] == rewards[i] ? x : 0.0; };
  const double n = kAllGraded ? static_cast<double>(count) : lane_sum(count, [&](int64_t i) { return graded(i, 1.0); });
  const double sum = lane_sum(count, [&](int64_t i) { return graded(i, rewards[i]); });
  if (kAllGraded && std::isnan(sum)) return moments_of<false>(rewards, count);
  const double mean = sum / n;
  double rests[4] = {0, 0, 0, 0}, squares[4] = {0, 0, 0, 0};
  const auto add = [&](int64_t i, int k) {
    const double d = graded(i, rewards[i] - mean);
    rests[k] += d;
    squares[k] += d * d;
  };
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int k = 0; k < 4; ++k) add(i + k, k);
  }
  for (int k = 0; i < count; ++i, ++k) add(i, k);
  const double rest = (rests[0] + rests[2]) + (rests[1] + rests[3]);
  const double square = (squares[0] + squares[2]) + (squares[1] + squares[3]);
  // Equal rewards differ from their mean by its rounding at most: where some differ by more, none need be compared.
  const double rounding = n * 1e-15 * mean;
  if (square > n * rounding * rounding) return {n, mean, square - rest * rest / n, false};
  int64_t first = 0;
  while (!kAllGraded && first + 1 < count && std::isnan(rewards[first])) ++first;
  const double one = count > 0 ? rewards[first] : 0.0;
  int64_t others = 0;
  for (i = 0; i < count; ++i) others += (rewards[i] != one) & (rewards[i] == rewards[i]);
  return {n, mean, square - rest * rest / n, others == 0};
}

void one_group(const GroupAdvantageArgs& args, int64_t g) {
  const int64_t begin = args.cu_group_sizes[g], count = args.cu_group_sizes[g + 1] - begin;
  const double* rewards = args.rewards + begin;
  float* advantages = args.advantages + begin;
  const Moments moments = moments_of<true>(rewards, count);
  const bool dead = moments.n < 2 || moments.all_equal;
  args.dead[g] = dead;
  if (dead) {
    for (int64_t i = 0; i < count; ++i) advantages[i] = 0;
    return;
  }
  double factor = 1;
  if (args.divide_by_std) factor = 1 / (std::sqrt(moments.m2 / (moments.n - args.ddof)) + args.eps);
  if (args.leave_one_out) factor = moments.n / (moments.n - 1);
  const double mean = moments.mean;
  for (int64_t i = 0; i < count; ++i) {
    const double r = rewards[i], a = (r - mean) * factor;
    advantages[i] = static_cast<float>(r == r ? a : 0.0);
  }
}

}  // namespace

void group_advantage(const GroupAdvantageArgs& args, int num_threads) {
  // a reward is read four times, from the nearest cache: waking a thread takes as long as some 50000 of them
  const int threads = threads_for(args.cu_group_sizes[args.groups], num_threads);
  parallel_for(args.groups, threads, [&](int64_t g) { one_group(args, g); });
}

}  // namespace fastrl::cpu
