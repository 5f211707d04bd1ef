// The two things that CUDA spells in a way of its own. tests/emulator has its own version of this file, so that the
// kernels compile as plain C++ there.
#pragma once
#include <cuda_runtime.h>

#include <utility>

// Shared memory of the block: `type name`, not initialised.
#define FASTRL_SHARED(type, name) __shared__ type name

namespace fastrl::cuda {

// Start kernel<<<grid, block, 0, stream>>>(arguments...) and return the cudaError_t of the start.
template <class... P, class... A>
int launch(void (*kernel)(P...), dim3 grid, dim3 block, void* stream, A&&... arguments) {
  kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<P>(std::forward<A>(arguments))...);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace fastrl::cuda
