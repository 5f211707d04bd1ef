// Four lanes per group, in the order of the CPU kernel (cpu/lanes.h): lane k takes the members k, k + 4, k + 8 ..., and
// the four sums are added as (0 + 2) + (1 + 3). With no fused multiply-add (see CMakeLists.txt) that gives the same
// bits. A group is read three times; it is at most a few kB and stays in L1.
#include <cmath>

#include "kernels/cuda/launch.h"
#include "kernels/group_advantage.h"

namespace fastrl::cuda {
namespace {

constexpr int kThreads = 128, kLanes = 4;
constexpr unsigned kFullWarp = 0xffffffffu;

__device__ double lane_sum(double mine) {
  mine += __shfl_xor_sync(kFullWarp, mine, 2);
  return mine + __shfl_xor_sync(kFullWarp, mine, 1);
}

__device__ double lane_max(double mine) {
  mine = fmax(mine, __shfl_xor_sync(kFullWarp, mine, 2));
  return fmax(mine, __shfl_xor_sync(kFullWarp, mine, 1));
}

__global__ void __launch_bounds__(kThreads) group_advantage_kernel(GroupAdvantageArgs args) {
  const int64_t g = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const int lane = threadIdx.x % kLanes;
  // Lanes beyond the last group stay for the shuffles, with no members.
  const bool exists = g < args.groups;
  const int64_t first = exists ? args.cu_group_sizes[g] + lane : 0, end = exists ? args.cu_group_sizes[g + 1] : 0;

  double n = 0, mean = 0, max = -INFINITY, minus_min = -INFINITY;
  for (int64_t i = first; i < end; i += kLanes) {
    const double r = args.rewards[i];
    if (isnan(r)) continue;
    n += 1;
    mean += r;
    max = fmax(max, r);
    minus_min = fmax(minus_min, -r);
  }
  n = lane_sum(n);
  mean = lane_sum(mean) / n;
  const bool dead = lane_max(max) == -lane_max(minus_min) || n < 2;

  double rest = 0, square = 0;  // `rest` is what the rounding of the mean has left over
  for (int64_t i = first; i < end; i += kLanes) {
    const double d = args.rewards[i] - mean;
    if (isnan(d)) continue;
    rest += d;
    square += d * d;
  }
  rest = lane_sum(rest);
  const double m2 = lane_sum(square) - rest * rest / n;

  if (exists && lane == 0) args.dead[g] = dead;
  double factor = 1;
  if (args.divide_by_std) factor = 1 / (sqrt(m2 / (n - args.ddof)) + args.eps);
  if (args.leave_one_out) factor = n / (n - 1);
  for (int64_t i = first; i < end; i += kLanes) {
    const double r = args.rewards[i];
    args.advantages[i] = dead || isnan(r) ? 0.0f : static_cast<float>((r - mean) * factor);
  }
}

}  // namespace

int group_advantage(const GroupAdvantageArgs& args, void* stream) {
  if (args.groups == 0) return cudaSuccess;
  const int64_t blocks = (args.groups * kLanes + kThreads - 1) / kThreads;
  return launch(group_advantage_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), stream, args);
}

}  // namespace fastrl::cuda
