// Each block of 64 threads adds up 64 numbers: in its two warps by shuffles, then through shared memory. `fault` plants
// one mistake (0: none); tests/test_emulator.py says which of the checks must see it.
#include <cstdint>
#include <limits>

#include "kernels/cuda/launch.h"

namespace {

enum Fault {
  kNone,
  kNoBarrier,               // a partial sum is read before it is written
  kNoSyncwarp,              // shared memory passed between lanes with only a shuffle in between
  kSharedNotWritten,        // one warp's partial sum is never written
  kLocalNotWritten,         // a local is read that was never written
  kGlobalPastEnd,           // input read one past its end
  kSharedPastEnd,           // shared memory written one past its end
  kLocalPastEnd,            // a local array read one past its end
  kTwoWriters,              // two threads write one result
  kBlocksShareSum,          // all blocks add to one number without an atomic
  kNeedsOtherBlock,         // uses the result of the block before it
  kDivergentBarrier,        // the two warps wait at different barriers
  kBarrierNotReached,       // one warp leaves while the other waits
  kShuffleAfterExit,        // lanes leave before a shuffle that names them
  kShuffleFromOutsideMask,  // a shuffle reads a lane that the mask leaves out
  kFullMaskInBranch,        // a shuffle names lanes that took the other branch
  kIndexOverflow,           // an index is multiplied in 32 bits
  kMisaligned,              // eight bytes are loaded from an address that is a multiple of four
};

struct Partials {
  float of_warp[2];
};
struct Lanes {
  float of[64];
};

__device__ float warp_sum(float value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

__global__ void sum_kernel(int fault, const float* in, float* out) {
  FASTRL_SHARED(Partials, partials);
  FASTRL_SHARED(Lanes, lanes);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 64;
  float value = in[first + thread];

  if (fault == kGlobalPastEnd) value += 0 * in[first + thread + 1];
  if (fault == kIndexOverflow) {
    const int stride = std::numeric_limits<int>::max() / 16 + static_cast<int>(gridDim.x);
    value += static_cast<float>(thread * stride == 7);
  }
  if (fault == kMisaligned)
    value += 0 * static_cast<float>(*reinterpret_cast<const int64_t*>(in + (thread | 1) - 2 * (thread / 62)));
  if (fault == kLocalPastEnd) {
    float copies[4] = {value, value, value, value};
    value = copies[3 + (blockIdx.x < gridDim.x)];
  }
  if (fault == kLocalNotWritten) {
    float pair[2];
    pair[0] = value;
    value += pair[blockIdx.x < gridDim.x];
  }
  if (fault == kShuffleAfterExit && lane > 20) return;
  if (fault == kFullMaskInBranch) {
    if (lane < 16) value += 0 * __shfl_sync(~0u, value, 0);
  }
  if (fault == kShuffleFromOutsideMask && lane < 20) value += 0 * __shfl_xor_sync(0xfffffu, value, 16);

  // Reverse the lanes through shared memory: the sum is the same.
  lanes.of[thread] = value;
  if (fault == kNoSyncwarp) {
    value = __shfl_sync(~0u, value, 0);
  } else {
    __syncwarp();
  }
  value = warp_sum(lanes.of[warp * 32 + 31 - lane]);

  if (lane == 0 && !(fault == kSharedNotWritten && warp == 1)) {
    partials.of_warp[warp + (fault == kSharedPastEnd)] = value;
  }
  if (fault == kDivergentBarrier && warp == 1) {
    __syncthreads();
  } else if (fault == kBarrierNotReached && warp == 1) {
    return;
  } else if (fault != kNoBarrier) {
    __syncthreads();
  }

  const float sum = partials.of_warp[0] + partials.of_warp[1];
  if (fault == kBlocksShareSum && thread == 0) out[0] += sum;
  if (fault == kNeedsOtherBlock && thread == 0) out[blockIdx.x] = sum + (blockIdx.x > 0 ? 0 * out[blockIdx.x - 1] : 0);
  if (fault == kBlocksShareSum || fault == kNeedsOtherBlock) return;
  if (thread == 0 || (fault == kTwoWriters && thread == 1)) out[blockIdx.x] = sum;
}

}  // namespace

extern "C" int sum_of_blocks(int fault, const float* in, float* out, int blocks) {
  return fastrl::cuda::launch(sum_kernel, dim3(static_cast<unsigned>(blocks)), dim3(64), nullptr, fault, in, out);
}
