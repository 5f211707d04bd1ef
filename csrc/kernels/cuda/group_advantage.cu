// One thread per group, which walks its members in the order of the CPU kernel: the same additions in the same order
// (and no fused multiply-add, see CMakeLists.txt), so the same bits. Groups are small and many; a tree over the lanes
// of a warp would save some of a launch's microseconds and cost the equality.
#include <cmath>

#include "kernels/cuda/launch.h"
#include "kernels/group_advantage.h"

namespace fastrl::cuda {
namespace {

constexpr int kThreads = 64;  // few, so that two thousand groups spread over many multiprocessors

__global__ void __launch_bounds__(kThreads) group_advantage_kernel(GroupAdvantageArgs args) {
  const int64_t g = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (g >= args.groups) return;
  const int64_t begin = args.cu_group_sizes[g], end = args.cu_group_sizes[g + 1];

  double n = 0, mean = 0, m2 = 0, least = INFINITY, most = -INFINITY;
  for (int64_t i = begin; i < end; ++i) {
    const double r = args.rewards[i];
    if (isnan(r)) continue;
    n += 1;
    const double delta = r - mean;
    mean += delta / n;
    m2 += delta * (r - mean);
    least = fmin(least, r);
    most = fmax(most, r);
  }

  const bool dead = n < 2 || least == most;
  args.dead[g] = dead;
  double divisor = 1;
  if (!dead && args.divide_by_std) divisor = sqrt(m2 / (n - args.ddof)) + args.eps;
  if (!dead && args.leave_one_out) divisor = (n - 1) / n;
  for (int64_t i = begin; i < end; ++i) {
    const double r = args.rewards[i];
    args.advantages[i] = dead || isnan(r) ? 0.0f : static_cast<float>((r - mean) / divisor);
  }
}

}  // namespace

int group_advantage(const GroupAdvantageArgs& args, void* stream) {
  if (args.groups == 0) return cudaSuccess;
  const int64_t blocks = (args.groups + kThreads - 1) / kThreads;
  return launch(group_advantage_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), stream, args);
}

}  // namespace fastrl::cuda
