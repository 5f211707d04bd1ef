// Found before csrc/kernels/cuda/launch.h when a CUDA source is compiled for the emulator; the same two names.
#pragma once
#include <cstdio>
#include <utility>

#include "cuda_runtime.h"

#define FASTRL_SHARED(type, name) \
  type& name = *static_cast<type*>(emulator::static_shared({__FILE__, __LINE__}, sizeof(type), alignof(type)))

namespace fastrl::cuda {

template <class... P, class... A>
int launch(void (*kernel)(P...), dim3 grid, dim3 block, void*, A&&... arguments) {
  struct Call {
    void (*kernel)(P...);
    std::tuple<P...> arguments;
  } call{kernel, {static_cast<P>(std::forward<A>(arguments))...}};
  const auto invoke = [](void* c) { std::apply(static_cast<Call*>(c)->kernel, static_cast<Call*>(c)->arguments); };
  const std::string error = emulator::run(grid, block, invoke, &call);
  if (error.empty()) return cudaSuccess;
  std::fprintf(stderr, "emulator: %s\n", error.c_str());
  return cudaErrorLaunchFailure;
}

}  // namespace fastrl::cuda
