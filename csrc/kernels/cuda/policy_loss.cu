// One block per sequence, then one block over the sequences. A token is a few numbers to load and some hundred float64
// instructions, which a data-centre GPU hides behind the loads; in exchange nothing is lost in float32 on the way.
// All sums go through fixed trees, so a run repeats bit for bit.
#include <cmath>

#include "kernels/cuda/launch.h"
#include "kernels/policy_loss.h"

namespace fastrl::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr double kMostLogRatio = 20;

// [0] is the loss, [1 + i] the statistic i. Maxima and minima are kept as maxima: of -x for kRatioMin.
constexpr int kSums = 1 + kPolicyLossStats;

__device__ constexpr bool is_maximum(int i) { return i == 1 + kRatioMin || i == 1 + kRatioMax || i == 1 + kGapMax; }

struct Sums {
  double of[kSums];
};

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums.of[i] = is_maximum(i) ? -INFINITY : 0;
}

__device__ __forceinline__ double combined(int i, double a, double b) { return is_maximum(i) ? fmax(a, b) : a + b; }

struct WarpSums {
  Sums of[kWarps];
};

// The sums of the whole block, in thread 0.
__device__ __forceinline__ void reduce_block(Sums& mine, WarpSums& warps) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    for (int distance = 16; distance > 0; distance /= 2) {
      mine.of[i] = combined(i, mine.of[i], __shfl_xor_sync(kFullWarp, mine.of[i], distance));
    }
    if (threadIdx.x % 32 == 0) warps.of[threadIdx.x / 32].of[i] = mine.of[i];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    for (int w = 1; w < kWarps; ++w) mine.of[i] = combined(i, mine.of[i], warps.of[w].of[i]);
  }
}

struct Cut {
  double value;
  bool inside;
};

__device__ Cut cut(double x) {
  if (x > kMostLogRatio) return {kMostLogRatio, false};
  if (x < -kMostLogRatio) return {-kMostLogRatio, false};
  return {x, true};  // NaN too
}

template <class Real>
__device__ double weight_of(const PolicyLossArgs<Real>& args, int64_t q, int64_t t) {
  const double weight = args.weights[q];
  return args.token_weights ? weight * args.token_weights[t] : weight;
}

template <class Real>
__device__ Cut log_ratio_of(const PolicyLossArgs<Real>& args, int64_t t) {
  if (args.old_logprobs == nullptr) return {0, true};
  return cut(static_cast<double>(args.logprobs[t]) - args.old_logprobs[t]);
}

// A ratio that all tokens of a sequence share, and the mean of their weights.
struct Common {
  double ratio, share;
};
struct WarpCommon {
  double log_ratio[kWarps], weight[kWarps], length[kWarps];
};

template <class Real>
__device__ Common gather(const PolicyLossArgs<Real>& args, int64_t q, WarpCommon& warps) {
  double log_ratio = 0, weight = 0, length = 0;
  for (int64_t t = args.cu_targets[q] + threadIdx.x; t < args.cu_targets[q + 1]; t += kThreads) {
    const double w = weight_of(args, q, t);
    if (w == 0) continue;
    log_ratio += log_ratio_of(args, t).value;
    weight += w;
    length += 1;
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    log_ratio += __shfl_xor_sync(kFullWarp, log_ratio, distance);
    weight += __shfl_xor_sync(kFullWarp, weight, distance);
    length += __shfl_xor_sync(kFullWarp, length, distance);
  }
  if (threadIdx.x % 32 == 0) {
    const int warp = threadIdx.x / 32;
    warps.log_ratio[warp] = log_ratio;
    warps.weight[warp] = weight;
    warps.length[warp] = length;
  }
  __syncthreads();
  log_ratio = weight = length = 0;
  for (int w = 0; w < kWarps; ++w) {
    log_ratio += warps.log_ratio[w];
    weight += warps.weight[w];
    length += warps.length[w];
  }
  return {length > 0 ? exp(log_ratio / length) : 1.0, weight / length};
}

struct Term {
  double value, slope;  // of the policy or the KL term, along the log ratio or the logprob
};

template <class Real>
__device__ Term policy_term(const PolicyLossArgs<Real>& args, double a, double ratio, double logprob) {
  if (a == 0) return {0, 0};
  const double low = 1 - args.clip_low, high = 1 + args.clip_high;
  const double raised = ratio < low ? low : ratio, clipped = raised > high ? high : raised;  // NaN stays
  if (args.clip == ClipKind::cispo) return {-clipped * a * logprob, -clipped * a};
  if (a < 0 && ratio > args.dual_clip) return {-a * args.dual_clip, 0};
  const double whole = -a * ratio, cut = -a * clipped;
  if (cut > whole) return {cut, 0};
  return {whole, whole};
}

__device__ Term kl_term(KlKind kind, double d) {
  if (kind == KlKind::k1) return {d, 1};
  if (kind == KlKind::k2) return {d * d / 2, d};
  const double x = -d, above = expm1(x);
  // e^x - 1 - x: for a small x the difference would be all rounding
  const double line = fabs(x) < 1e-3 ? x * x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120)))) : above - x;
  return {line, -above};
}

template <class Real>
__device__ void add_token(const PolicyLossArgs<Real>& args, int64_t q, int64_t t, const Common& common, Sums& sums) {
  const double w = weight_of(args, q, t);
  if (w == 0) {
    args.grad[t] = 0;
    return;
  }
  const double a = args.advantages[q], logprob = args.logprobs[t];
  const Cut log_ratio = log_ratio_of(args, t);
  const bool by_token = args.ratio == RatioKind::token, ppo = args.clip == ClipKind::ppo;
  const double ratio = by_token ? exp(log_ratio.value) : common.ratio;
  double pull = args.ratio == RatioKind::sequence && ppo ? common.share : w;
  // outside the cut the ratio is constant; of sequence_token only the value is a ratio
  if (ppo && args.ratio != RatioKind::sequence_token && !log_ratio.inside) pull = 0;
  const Term policy = policy_term(args, a, ratio, logprob);
  double value = policy.value, grad = pull * policy.slope;
  if (args.ref_logprobs != nullptr) {
    const Cut d = cut(logprob - args.ref_logprobs[t]);
    const Term kl = kl_term(args.kl, d.value);
    value += args.kl_coef * kl.value;
    if (d.inside) grad += w * args.kl_coef * kl.slope;
    sums.of[1 + kKlSum] += kl.value;
  }
  args.grad[t] = static_cast<Real>(grad);

  sums.of[0] += w * value;
  sums.of[1 + kTokens] += 1;
  sums.of[1 + kClippedLow] += a < 0 && ratio < 1 - args.clip_low;
  sums.of[1 + kClippedHigh] += a > 0 && ratio > 1 + args.clip_high;
  sums.of[1 + kClippedDual] += a < 0 && ppo && ratio > args.dual_clip;
  sums.of[1 + kRatioSum] += ratio;
  sums.of[1 + kRatioMin] = fmax(sums.of[1 + kRatioMin], -ratio);
  sums.of[1 + kRatioMax] = fmax(sums.of[1 + kRatioMax], ratio);
  if (args.rollout_logprobs == nullptr) return;
  const double gap = fabs(logprob - args.rollout_logprobs[t]);
  sums.of[1 + kGapSum] += gap;
  sums.of[1 + kGapMax] = fmax(sums.of[1 + kGapMax], gap);
}

template <class Real>
__global__ void __launch_bounds__(kThreads) policy_loss_sequence_kernel(PolicyLossArgs<Real> args) {
  FASTRL_SHARED(WarpCommon, warp_common);
  FASTRL_SHARED(WarpSums, warp_sums);
  const int64_t q = blockIdx.x;
  Common common = {1, 0};
  if (args.ratio != RatioKind::token) common = gather(args, q, warp_common);
  Sums sums;
  clear(sums);
  for (int64_t t = args.cu_targets[q] + threadIdx.x; t < args.cu_targets[q + 1]; t += kThreads) {
    add_token(args, q, t, common, sums);
  }
  reduce_block(sums, warp_sums);
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int i = 0; i < kSums; ++i) args.partial[q * kSums + i] = sums.of[i];
}

template <class Real>
__global__ void __launch_bounds__(kThreads) policy_loss_total_kernel(PolicyLossArgs<Real> args) {
  FASTRL_SHARED(WarpSums, warp_sums);
  Sums sums;
  clear(sums);
  for (int64_t q = threadIdx.x; q < args.sequences; q += kThreads) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums.of[i] = combined(i, sums.of[i], args.partial[q * kSums + i]);
  }
  reduce_block(sums, warp_sums);
  if (threadIdx.x != 0) return;
  *args.loss = sums.of[0];
#pragma unroll
  for (int i = 0; i < kPolicyLossStats; ++i) args.stats[i] = i == kRatioMin ? -sums.of[1 + i] : sums.of[1 + i];
}

}  // namespace

template <class Real>
int policy_loss(const PolicyLossArgs<Real>& args, void* stream) {
  if (args.sequences > 0) {
    const dim3 grid(static_cast<unsigned>(args.sequences));
    const int error = launch(policy_loss_sequence_kernel<Real>, grid, dim3(kThreads), stream, args);
    if (error != cudaSuccess) return error;
  }
  return launch(policy_loss_total_kernel<Real>, dim3(1), dim3(kThreads), stream, args);
}

template int policy_loss(const PolicyLossArgs<float>&, void*);
template int policy_loss(const PolicyLossArgs<double>&, void*);

}  // namespace fastrl::cuda
