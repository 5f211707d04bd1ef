// Run CUDA kernels on the CPU: every CUDA thread is a fiber, and one operating-system thread runs them all. A fiber
// goes on until it meets a barrier, a warp operation, an atomic or its end; which fiber then runs is drawn from the
// seed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
extern uint3 threadIdx, blockIdx;  // of the running fiber, set at every switch
extern dim3 blockDim, gridDim;

namespace emulator {

struct Settings {
  uint64_t seed = 0;    // 0: blocks and threads in order; else the order is drawn from it
  size_t resident = 1;  // blocks that run interleaved
};
void configure(const Settings& settings);

struct Where {
  const char* file;
  int line;
};

enum class Vote { none, count, all, any };
enum class WarpOp { sync, shuffle, ballot };

// __syncthreads and its voting kin: returns once every thread of the block is here.
int block_barrier(Vote vote, int predicate, Where where);
// Returns once every lane of `mask` is here. shuffle: the value of lane `source`; ballot: the bits of all values.
uint64_t warp_op(WarpOp op, unsigned mask, int source, uint64_t value, Where where);
int lane();
// The block's static shared memory made at `where`; filled with 0xFF (NaN, -1) when the block starts.
void* static_shared(Where where, size_t bytes, size_t alignment);
// Maybe let another fiber run: atomics are where threads of different warps overtake each other.
void may_yield();

// Run a grid to its end. Returns what it did that is undefined or would hang on a device, or nothing.
std::string run(dim3 grid, dim3 block, void (*kernel)(void*), void* arguments);

}  // namespace emulator
