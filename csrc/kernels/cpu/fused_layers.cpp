#include <algorithm>
#include <vector>

#include "kernels/cpu/fused_layers_ranges.h"
#include "kernels/cpu/parallel.h"

namespace fastrl::cpu {

#ifdef FASTRL_WITH_AVX2
namespace {

constexpr int64_t kRows = 64;       // of a norm that one thread takes at once
constexpr int64_t kNumbers = 8192;  // of a gate

int64_t pieces_of(int64_t total, int64_t size) { return (total + size - 1) / size; }

}  // namespace

void rms_norm(const RmsNormArgs& args, int num_threads) {
  parallel_for(pieces_of(args.rows, kRows), threads_for(args.rows * args.width, num_threads),
               [&](int64_t i) { avx2::rms_norm_rows(args, i * kRows, std::min((i + 1) * kRows, args.rows)); });
}

void rms_norm_backward(const RmsNormArgs& args, const RmsNormGrads& grads, int num_threads) {
  const int64_t pieces = pieces_of(args.rows, kRows);
  std::vector<float> sums(pieces * args.width);
  parallel_for(pieces, threads_for(args.rows * args.width, num_threads), [&](int64_t i) {
    avx2::rms_norm_rows_backward(args, grads, i * kRows, std::min((i + 1) * kRows, args.rows),
                                 sums.data() + i * args.width);
  });
  for (int64_t j = 0; j < args.width; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < pieces; ++i) sum += sums[i * args.width + j];
    grads.weight[j] = static_cast<float>(sum);
  }
}

void swiglu(const SwigluArgs& args, int num_threads) {
  parallel_for(pieces_of(args.count, kNumbers), threads_for(args.count, num_threads),
               [&](int64_t i) { avx2::swiglu_range(args, i * kNumbers, std::min((i + 1) * kNumbers, args.count)); });
}

void swiglu_backward(const SwigluArgs& args, const SwigluGrads& grads, int num_threads) {
  parallel_for(pieces_of(args.count, kNumbers), threads_for(args.count, num_threads), [&](int64_t i) {
    avx2::swiglu_range_backward(args, grads, i * kNumbers, std::min((i + 1) * kNumbers, args.count));
  });
}
#endif

}  // namespace fastrl::cpu
