// Layers of a transformer that make one pass over memory here and many in torch.
#pragma once
#include <cstdint>

namespace fastrl {

// out = weight x / sqrt(mean of x^2 + eps), row by row
struct RmsNormArgs {
  const float *x, *weight;    // [rows, width], [width]
  int64_t rows, width;        // width a multiple of 8
  float eps;                  // read by the forward pass alone
  float *out, *inverse_root;  // as x, [rows]; written by the forward pass; the backward pass reads inverse_root
};

struct RmsNormGrads {
  const float* out;
  float *x, *weight;  // as their values; written
};

// out = gate sigmoid(gate) up
struct SwigluArgs {
  const float *gate, *up;
  int64_t count;  // a multiple of 8
  float* out;     // written by the forward pass alone
};

struct SwigluGrads {
  const float* out;
  float *gate, *up;  // written
};

namespace cpu {
// Only where use_avx2(). No result depends on num_threads.
void rms_norm(const RmsNormArgs& args, int num_threads);
void rms_norm_backward(const RmsNormArgs& args, const RmsNormGrads& grads, int num_threads);
void swiglu(const SwigluArgs& args, int num_threads);
void swiglu_backward(const SwigluArgs& args, const SwigluGrads& grads, int num_threads);
}  // namespace cpu

}  // namespace fastrl
