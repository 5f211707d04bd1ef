// One warp per group: lanes stride over the members, Welford states are merged by shuffles in a fixed tree, so the
// result is the same on every run. Rewards are read twice; a group is at most a few kB and stays in L1.
#include <cuda_runtime.h>

#include <cmath>

#include "kernels/group_advantage.h"

namespace fastrl::cuda {
namespace {

constexpr int kThreads = 128;
constexpr unsigned kFullWarp = 0xffffffffu;

struct Moments {
  double n, mean, m2, min, max;
};

__device__ Moments merged(const Moments& a, const Moments& b) {
  const double n = a.n + b.n;
  if (n == 0) return a;
  const double delta = b.mean - a.mean;
  return {n, (a.n * a.mean + b.n * b.mean) / n, a.m2 + b.m2 + delta * delta * a.n * b.n / n, fmin(a.min, b.min),
          fmax(a.max, b.max)};
}

__device__ Moments of_warp(Moments mine) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const Moments other = {__shfl_xor_sync(kFullWarp, mine.n, offset), __shfl_xor_sync(kFullWarp, mine.mean, offset),
                           __shfl_xor_sync(kFullWarp, mine.m2, offset), __shfl_xor_sync(kFullWarp, mine.min, offset),
                           __shfl_xor_sync(kFullWarp, mine.max, offset)};
    mine = merged(mine, other);
  }
  return mine;
}

__global__ void __launch_bounds__(kThreads) group_advantage_kernel(GroupAdvantageArgs args) {
  const int64_t g = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / 32;
  if (g >= args.groups) return;  // whole warps leave together
  const int lane = threadIdx.x % 32;
  const int64_t begin = args.cu_group_sizes[g], end = args.cu_group_sizes[g + 1];

  Moments mine = {0, 0, 0, INFINITY, -INFINITY};
  for (int64_t i = begin + lane; i < end; i += 32) {
    const double r = args.rewards[i];
    if (isnan(r)) continue;
    mine.n += 1;
    const double delta = r - mine.mean;
    mine.mean += delta / mine.n;
    mine.m2 += delta * (r - mine.mean);
    mine.min = fmin(mine.min, r);
    mine.max = fmax(mine.max, r);
  }
  mine = of_warp(mine);

  const bool dead = mine.n < 2 || mine.min == mine.max;
  if (lane == 0) args.dead[g] = dead;
  // Every lane must use the same numbers: the xor tree adds in another order per lane.
  const double mean = __shfl_sync(kFullWarp, mine.mean, 0), m2 = __shfl_sync(kFullWarp, mine.m2, 0);
  double divisor = 1;
  if (!dead && args.divide_by_std) divisor = sqrt(m2 / (mine.n - args.ddof)) + args.eps;
  if (!dead && args.leave_one_out) divisor = (mine.n - 1) / mine.n;
  for (int64_t i = begin + lane; i < end; i += 32) {
    const double r = args.rewards[i];
    args.advantages[i] = dead || isnan(r) ? 0.0f : static_cast<float>((r - mean) / divisor);
  }
}

}  // namespace

int group_advantage(const GroupAdvantageArgs& args, void* stream) {
  if (args.groups == 0) return cudaSuccess;
  const int64_t blocks = (args.groups * 32 + kThreads - 1) / kThreads;
  group_advantage_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fastrl::cuda
