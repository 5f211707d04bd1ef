#include "kernels/gradient_sketch.h"

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "kernels/cpu/parallel.h"

namespace fastrl::cpu {
namespace {

// e^x for x <= 0, within 2 ulp: x = n ln 2 + r with |r| <= ln 2 / 2 and the Taylor series to r^13.
double exp_of(double x) {
  if (x < -40) return 0;
  const double n = std::floor(x * 1.4426950408889634 + 0.5);
  // ln 2 in two parts, the first with trailing zeros so that n times it is exact
  const double r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800.0;
  for (const double over :
       {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0}) {
    p = p * r + 1.0 / over;
  }
  const uint64_t bits = static_cast<uint64_t>(static_cast<int64_t>(n) + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

void one_rollout(const GradientSketchArgs& args, int64_t i) {
  float* row = args.sketch + i * args.width;
  std::memset(row, 0, static_cast<size_t>(args.width) * sizeof(float));
  int shift = 64;
  for (int64_t width = args.width; width > 1; width /= 2) --shift;
  bool broken = false;
  for (int64_t t = args.cu_seqlens[i]; t < args.cu_seqlens[i + 1]; ++t) {
    const double logprob = args.logprobs[t];
    broken = broken || std::isnan(logprob);
    const double miss = logprob < 0 ? 1 - exp_of(logprob) : 0;
    const float q = static_cast<float>(std::floor(miss * 1024 + 0.5) / 1024);
    const uint64_t h = mix_bits(static_cast<uint64_t>(args.token_ids[t]) + static_cast<uint64_t>(args.seed));
    row[h >> shift] += h & 1 ? -q : q;
  }
  if (broken) row[0] = std::numeric_limits<float>::quiet_NaN();
}

}  // namespace

void gradient_sketch(const GradientSketchArgs& args, int num_threads) {
  const int64_t work = args.cu_seqlens[args.rollouts] * 8 + args.rollouts * args.width;
  parallel_for(args.rollouts, threads_for(work, num_threads), [&](int64_t i) { one_rollout(args, i); });
}

}  // namespace fastrl::cpu
