// Stands in for the toolkit's header where CUDA sources are compiled for tests/emulator: only what our kernels use.
#pragma once
#include <math.h>

#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "scheduler.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

typedef struct emulated_stream* cudaStream_t;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

// Default arguments are evaluated at the call: they say where in the kernel a barrier is.
#define EMULATOR_HERE emulator::Where here = {__builtin_FILE(), __builtin_LINE()}

inline void __syncthreads(EMULATOR_HERE) { emulator::block_barrier(emulator::Vote::none, 0, here); }
inline int __syncthreads_count(int predicate, EMULATOR_HERE) {
  return emulator::block_barrier(emulator::Vote::count, predicate, here);
}
inline int __syncthreads_and(int predicate, EMULATOR_HERE) {
  return emulator::block_barrier(emulator::Vote::all, predicate, here);
}
inline int __syncthreads_or(int predicate, EMULATOR_HERE) {
  return emulator::block_barrier(emulator::Vote::any, predicate, here);
}
inline void __syncwarp(unsigned mask = ~0u, EMULATOR_HERE) {
  emulator::warp_op(emulator::WarpOp::sync, mask, 0, 0, here);
}

namespace emulator {
template <class T>
T shuffle(unsigned mask, T value, int source, Where where) {
  static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8), "shuffles take 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = warp_op(WarpOp::shuffle, mask, source, bits, where);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, EMULATOR_HERE) {
  return emulator::shuffle(mask, value, source & 31, here);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, EMULATOR_HERE) {
  return emulator::shuffle(mask, value, emulator::lane() ^ bits, here);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_HERE) {
  return static_cast<unsigned>(emulator::warp_op(emulator::WarpOp::ballot, mask, 0, predicate != 0, here));
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_HERE) {
  return emulator::warp_op(emulator::WarpOp::ballot, mask, 0, predicate != 0, here) != 0;
}

namespace emulator {
// A real atomic operation of the CPU, so that ThreadSanitizer knows it for one; relaxed, as CUDA's are.
template <class T, class F>
T read_modify_write(T* at, F next) {
  may_yield();
  T old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(at, &old, next(old), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
}  // namespace emulator

inline int atomicAdd(int* at, int value) {
  return emulator::read_modify_write(at, [=](int old) { return old + value; });
}
inline int atomicExch(int* at, int value) {
  return emulator::read_modify_write(at, [=](int) { return value; });
}
inline int atomicCAS(int* at, int expected, int value) {
  return emulator::read_modify_write(at, [=](int old) { return old == expected ? value : old; });
}

inline float __fmul_rn(float a, float b) { return a * b; }
