#include "kernels/group_advantage.h"

#include <cmath>
#include <limits>

#include "kernels/cpu/parallel.h"

namespace fastrl::cpu {
namespace {

struct Moments {
  int64_t n = 0;
  double mean = 0, m2 = 0;
  double min = std::numeric_limits<double>::infinity(), max = -std::numeric_limits<double>::infinity();

  void add(double r) {
    ++n;
    const double delta = r - mean;
    mean += delta / static_cast<double>(n);
    m2 += delta * (r - mean);
    min = std::fmin(min, r);
    max = std::fmax(max, r);
  }
};

void one_group(const GroupAdvantageArgs& args, int64_t g) {
  const int64_t begin = args.cu_group_sizes[g], end = args.cu_group_sizes[g + 1];
  Moments moments;
  for (int64_t i = begin; i < end; ++i) {
    if (!std::isnan(args.rewards[i])) moments.add(args.rewards[i]);
  }
  const bool dead = moments.n < 2 || moments.min == moments.max;
  args.dead[g] = dead;
  const double n = static_cast<double>(moments.n);
  double divisor = 1;
  if (!dead && args.divide_by_std) divisor = std::sqrt(moments.m2 / (n - args.ddof)) + args.eps;
  if (!dead && args.leave_one_out) divisor = (n - 1) / n;
  for (int64_t i = begin; i < end; ++i) {
    const bool teaches = !dead && !std::isnan(args.rewards[i]);
    args.advantages[i] = teaches ? static_cast<float>((args.rewards[i] - moments.mean) / divisor) : 0.0f;
  }
}

}  // namespace

void group_advantage(const GroupAdvantageArgs& args, int num_threads) {
  const int threads = threads_for(args.cu_group_sizes[args.groups], num_threads);
  parallel_for(args.groups, threads, [&](int64_t g) { one_group(args, g); });
}

}  // namespace fastrl::cpu
