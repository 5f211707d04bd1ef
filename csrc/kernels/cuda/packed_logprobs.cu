// One pass over a slab of logits, bound by memory: every logit is read once. Loads are one float per lane and
// kPerThread of them in flight, 128 bytes per warp and instruction, so rows may start at any column.
#include <cuda_bf16.h>

#include <cmath>

#include "kernels/cuda/launch.h"
#include "kernels/packed_logprobs.h"

namespace fastrl::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kPerThread = 8;
constexpr int kTile = kThreads * kPerThread;
constexpr unsigned kFullWarp = 0xffffffffu;
// e^d below this is not a normal float32; d * e^d must not become -inf * 0.
constexpr float kUnderflow = -87.33654f;

// Running max z, sum e^d and sum d e^d with d = z - max. While max is -inf nothing has been added, unless a NaN was.
struct Sums {
  float max, sum_exp, sum_dexp;
};

__device__ __forceinline__ void rebase(Sums& a, float max) {
  if (a.max != max && a.max != -INFINITY) {  // max >= a.max; -inf - -inf would be NaN
    const float shift = a.max - max, c = expf(shift);
    a.sum_dexp = c * fmaf(fmaxf(shift, kUnderflow), a.sum_exp, a.sum_dexp);
    a.sum_exp *= c;
  }
  a.max = max;
}

__device__ __forceinline__ Sums merged(Sums a, Sums b) {
  const float max = fmaxf(a.max, b.max);
  rebase(a, max);
  rebase(b, max);
  return {max, a.sum_exp + b.sum_exp, a.sum_dexp + b.sum_dexp};
}

__device__ Sums of_warp(Sums mine) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const Sums other = {__shfl_xor_sync(kFullWarp, mine.max, distance),
                        __shfl_xor_sync(kFullWarp, mine.sum_exp, distance),
                        __shfl_xor_sync(kFullWarp, mine.sum_dexp, distance)};
    mine = merged(mine, other);
  }
  return mine;
}

__device__ Sums of_thread(const float* x, int64_t cols, float scale) {
  Sums sums = {-INFINITY, 0, 0};
  for (int64_t first = threadIdx.x; first < cols; first += kTile) {
    float z[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int64_t j = first + k * kThreads;
      z[k] = j < cols ? scale * x[j] : -INFINITY;
    }
    float max = sums.max;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) max = fmaxf(max, z[k]);
    rebase(sums, max);
    const float origin = max == -INFINITY ? 0.0f : max;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const float d = z[k] - origin, e = expf(d);
      sums.sum_exp += e;
      sums.sum_dexp = fmaf(fmaxf(d, kUnderflow), e, sums.sum_dexp);
    }
  }
  return sums;
}

struct WarpSums {
  Sums of[kWarps];
};

// One block per row. The order of all sums is fixed by the lengths, so a run repeats bit for bit.
__global__ void __launch_bounds__(kThreads) logit_fold_kernel(LogitFoldArgs args) {
  FASTRL_SHARED(WarpSums, warps);
  const LogitSlab& slab = args.slab;
  const int64_t row = blockIdx.x;
  const float* x = args.logits + row * slab.row_stride;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const Sums mine = of_warp(of_thread(x, slab.cols, slab.scale));
  if (lane == 0) warps.of[warp] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Sums sums = {args.row_max[row], args.sum_exp[row], args.sum_dexp[row]};
  for (int w = 0; w < kWarps; ++w) sums = merged(sums, warps.of[w]);
  args.row_max[row] = sums.max;
  args.sum_exp[row] = sums.sum_exp;
  args.sum_dexp[row] = sums.sum_dexp;
  const int64_t column = slab.targets[row] - slab.vocab_begin;
  if (column >= 0 && column < slab.cols) args.target_logit[row] = slab.scale * x[column];
}

__device__ void store(float* place, float value) { *place = value; }
__device__ void store(__nv_bfloat16* place, float value) { *place = __float2bfloat16(value); }

// One block per row (x) and tile of columns (y).
template <class Out>
__global__ void __launch_bounds__(kThreads) logit_grad_kernel(LogitGradArgs args, Out* out, int64_t out_stride) {
  const LogitSlab& slab = args.slab;
  const int64_t row = blockIdx.x;
  const float* x = args.logits + row * slab.row_stride;
  Out* dx = out + row * out_stride;
  const float max = args.row_max[row], log_sum = args.log_sum[row], entropy = args.entropy[row];
  const float g = args.grad_logprobs[row], h = args.grad_entropy[row];
  const int64_t target = slab.targets[row] - slab.vocab_begin;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kTile + threadIdx.x;
  float z[kPerThread];  // all loads before the first store, which may go to the same memory
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t j = first + k * kThreads;
    z[k] = j < slab.cols ? slab.scale * x[j] : 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t j = first + k * kThreads;
    if (j >= slab.cols) continue;
    const float lp = (z[k] - max) - log_sum;
    const float above = fmaxf(lp, kUnderflow) + entropy;
    const float push = j == target ? g : 0.0f;
    store(dx + j, slab.scale * (push - expf(lp) * fmaf(h, above, g)));
  }
}

template <class Out>
int launch_grad(const LogitGradArgs& args, Out* out, int64_t out_stride, void* stream) {
  const int64_t tiles = (args.slab.cols + kTile - 1) / kTile;
  const dim3 grid(static_cast<unsigned>(args.slab.rows), static_cast<unsigned>(tiles));
  return launch(logit_grad_kernel<Out>, grid, dim3(kThreads), stream, args, out, out_stride);
}

}  // namespace

int logit_fold(const LogitFoldArgs& args, void* stream) {
  if (args.slab.rows == 0) return cudaSuccess;
  return launch(logit_fold_kernel, dim3(static_cast<unsigned>(args.slab.rows)), dim3(kThreads), stream, args);
}

int logit_grad(const LogitGradArgs& args, void* grad_bf16, void* stream) {
  if (args.slab.rows == 0 || args.slab.cols == 0) return cudaSuccess;
  if (grad_bf16 == nullptr) return launch_grad(args, args.logits, args.slab.row_stride, stream);
  return launch_grad(args, static_cast<__nv_bfloat16*>(grad_bf16), args.slab.cols, stream);
}

}  // namespace fastrl::cuda
