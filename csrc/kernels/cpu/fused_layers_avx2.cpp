// Compiled with -mavx2 -mfma: entered only after use_avx2().
#include "kernels/cpu/fused_layers_ranges.h"
#include "kernels/cpu/vector.h"

namespace fastrl::cpu::avx2 {
namespace {

// 1 / (1 + e^-x); e^88 is finite, and a share of 1 / e^88 of x is none
inline Vector sigmoid(Vector x) {
  const Vector e = exp_ps(min(all(88.0f), sub(all(0.0f), x)));
  return div(all(1.0f), add(all(1.0f), e));
}

}  // namespace

void rms_norm_rows(const RmsNormArgs& args, int64_t first, int64_t last) {
  const int64_t width = args.width;
  for (int64_t i = first; i < last; ++i) {
    const float* x = args.x + i * width;
    Vector squares = all(0.0f);
    for (int64_t j = 0; j < width; j += kWidth) squares = fmadd(load(x + j), load(x + j), squares);
    const float inverse_root = 1.0f / __builtin_sqrtf(sum_of(squares) / static_cast<float>(width) + args.eps);
    args.inverse_root[i] = inverse_root;
    for (int64_t j = 0; j < width; j += kWidth) {
      store(args.out + i * width + j, mul(load(args.weight + j), mul(load(x + j), all(inverse_root))));
    }
  }
}

// With n = x r, r = inverse_root: d weight = sum of g n, d x = r (weight g - n mean(weight g n))
void rms_norm_rows_backward(const RmsNormArgs& args, const RmsNormGrads& grads, int64_t first, int64_t last,
                            float* grad_weight) {
  const int64_t width = args.width;
  for (int64_t i = first; i < last; ++i) {
    const float *x = args.x + i * width, *g = grads.out + i * width;
    const Vector r = all(args.inverse_root[i]);
    Vector products = all(0.0f);
    for (int64_t j = 0; j < width; j += kWidth) {
      const Vector along = mul(load(g + j), mul(load(x + j), r));
      products = fmadd(load(args.weight + j), along, products);
      store(grad_weight + j, add(load(grad_weight + j), along));
    }
    const Vector mean = all(sum_of(products) / static_cast<float>(width));
    for (int64_t j = 0; j < width; j += kWidth) {
      const Vector pull = fnmadd(mul(load(x + j), r), mean, mul(load(args.weight + j), load(g + j)));
      store(grads.x + i * width + j, mul(r, pull));
    }
  }
}

void swiglu_range(const SwigluArgs& args, int64_t first, int64_t last) {
  for (int64_t j = first; j < last; j += kWidth) {
    const Vector gate = load(args.gate + j);
    store(args.out + j, mul(mul(gate, sigmoid(gate)), load(args.up + j)));
  }
}

// d (gate s) / d gate = s (1 + gate (1 - s)), s = sigmoid(gate)
void swiglu_range_backward(const SwigluArgs& args, const SwigluGrads& grads, int64_t first, int64_t last) {
  for (int64_t j = first; j < last; j += kWidth) {
    const Vector gate = load(args.gate + j), g = load(grads.out + j), s = sigmoid(gate);
    const Vector slope = mul(s, fmadd(gate, sub(all(1.0f), s), all(1.0f)));
    store(grads.gate + j, mul(mul(g, load(args.up + j)), slope));
    store(grads.up + j, mul(g, mul(gate, s)));
  }
}

}  // namespace fastrl::cpu::avx2
