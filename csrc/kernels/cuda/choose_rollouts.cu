// One block per group, and the operations of the CPU kernel one by one, so that a rule picks the same members with the
// same weights. An inner product is the work of a team of sixteen threads, a thread for each of its sums; scores and
// sums over members go to single threads; Cholesky's factor of `match` is made column by column by one warp. Memory is
// linear in rollouts * k, whatever the sizes of the groups, so nothing has to be known on the host.
#include <cfloat>
#include <cmath>

#include "kernels/choose_rollouts.h"
#include "kernels/cuda/launch.h"
#include "kernels/gradient_sketch.h"

namespace fastrl::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kTeams = kThreads / kProductSums;
constexpr unsigned kFullWarp = 0xffffffffu;

__device__ int team() { return threadIdx.x / kProductSums; }
__device__ bool leads_team() { return threadIdx.x % kProductSums == 0; }

// All threads of the team get it.
template <class A, class B>
__device__ double dot(const A* a, const B* b, int64_t n) {
  const unsigned mask = 0xffffu << (threadIdx.x & kProductSums);
  double sum = 0;
  for (int64_t i = threadIdx.x % kProductSums; i < n; i += kProductSums) {
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  for (int apart = kProductSums / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(mask, sum, apart);
  return sum;
}

// A group and its part of the workspace. What is said to be of a thread is read and written by that thread alone.
struct Group {
  const ChooseRolloutsArgs& args;
  int64_t begin, n;
  double* squares;       // [n]: |v_i|^2, or -1 where a member is not eligible
  double* state;         // [n]: largest similarity (maxmin), what is left of L_ii (dpp), <g_i, sum g> (match)
  double *whole, *part;  // [width]: sum of all g_i, of the kept w_i g_i
  double* rows;          // dpp: of Cholesky's factor; match: of G, [slot, n]
  double* factor;        // match: Cholesky's factor of G_PP
  double *x, *y, *s;     // match: weights by member; by place in `passive`: before, and what G_PP s = G_P . 1 says
  int64_t *members, *slots, *passive, *passive_slots;  // match, by place: who is in P, and which row is whose

  __device__ Group(const ChooseRolloutsArgs& a, int64_t rollouts, double* workspace, int64_t g)
      : args(a), begin(a.cu_group_sizes[g]), n(a.cu_group_sizes[g + 1] - begin) {
    whole = workspace + 2 * g * a.width;
    part = whole + a.width;
    double* lists = workspace + 2 * a.groups * a.width + begin;
    squares = lists;
    state = lists + rollouts;
    x = lists + 2 * rollouts;
    y = lists + 3 * rollouts;
    s = lists + 4 * rollouts;
    members = reinterpret_cast<int64_t*>(lists + 5 * rollouts);
    slots = reinterpret_cast<int64_t*>(lists + 6 * rollouts);
    passive = reinterpret_cast<int64_t*>(lists + 7 * rollouts);
    passive_slots = reinterpret_cast<int64_t*>(lists + 8 * rollouts);
    double* tables = workspace + 2 * a.groups * a.width + 9 * rollouts;
    rows = tables + begin * a.k;
    factor = rows + rollouts * a.k;
  }

  __device__ const float* vector(int64_t i) const { return args.vectors + (begin + i) * args.width; }
  __device__ double advantage(int64_t i) const { return args.advantages[begin + i]; }
  __device__ double quality(int64_t i) const { return fabs(advantage(i)); }
  __device__ bool eligible(int64_t i) const { return squares[i] >= 0; }
  __device__ bool kept(int64_t i) const { return args.order[begin + i] >= 0; }
  __device__ double gram(int64_t i) const { return advantage(i) * advantage(i) * squares[i]; }

  // With the threads of a team.
  __device__ double similarity(int64_t i, int64_t j) const {
    return similarity_of(dot(vector(i), vector(j), args.width), squares[i], squares[j], advantage(i) * advantage(j));
  }

  // By the thread that owns member i; no other reads it before the next barrier.
  __device__ void keep(int64_t i, int64_t turn, float weight) const {
    if (threadIdx.x != i % kThreads) return;
    args.order[begin + i] = turn;
    args.weights[begin + i] = weight;
  }
};

struct Best {
  double score;
  int64_t member;
};

struct WarpBest {
  Best of[kWarps];
};

__device__ __forceinline__ void take_better(Best& mine, double score, int64_t member) {
  if (score > mine.score || (score == mine.score && member >= 0 && member < mine.member)) mine = {score, member};
}

// The member not kept yet with the largest score, if that is above `least`; else -1. The whole block calls it, and
// meets another barrier before it does so again. A member's score is computed by the thread that owns it.
template <class Score>
__device__ int64_t best(const Group& group, double least, const Score& score) {
  FASTRL_SHARED(WarpBest, warps);
  Best mine = {least, -1};
  for (int64_t i = threadIdx.x; i < group.n; i += kThreads) {
    if (!group.eligible(i) || group.kept(i)) continue;
    const double s = score(i);
    if (s > mine.score) mine = {s, i};
  }
  for (int apart = 16; apart > 0; apart /= 2) {
    const double s = __shfl_xor_sync(kFullWarp, mine.score, apart);
    take_better(mine, s, __shfl_xor_sync(kFullWarp, mine.member, apart));
  }
  if (threadIdx.x % 32 == 0) warps.of[threadIdx.x / 32] = mine;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) take_better(mine, warps.of[w].score, warps.of[w].member);
  return mine.member;
}

// sum over the eligible members of weight(i) g_i into `total` [width], each coordinate by the thread that owns it.
template <class Weight>
__device__ void add_up(const Group& group, double* total, const Weight& weight) {
  for (int64_t c = threadIdx.x; c < group.args.width; c += kThreads) {
    double sum = 0;
    for (int64_t i = 0; i < group.n; ++i) {
      const double factor = weight(i) * group.advantage(i);
      if (group.eligible(i) && factor != 0) sum += factor * group.vector(i)[c];
    }
    total[c] = sum;
  }
}

__device__ void prepare(const Group& group, bool choose) {
  const ChooseRolloutsArgs& args = group.args;
  for (int64_t i = team(); i < group.n; i += kTeams) {
    const double square = dot(group.vector(i), group.vector(i), args.width);  // finite only where the whole vector is
    if (leads_team()) group.squares[i] = isfinite(group.advantage(i)) && isfinite(square) ? square : -1;
  }
  for (int64_t i = group.begin + threadIdx.x; i < group.begin + group.n; i += kThreads) {
    if (choose) args.weights[i] = 0;
    args.order[i] = -1;
  }
  __syncthreads();
  add_up(group, group.whole, [](int64_t) { return 1.0; });
}

__device__ void maxmin(const Group& group) {
  for (int64_t i = threadIdx.x; i < group.n; i += kThreads) group.state[i] = -2;
  for (int64_t turn = 0; turn < group.args.k; ++turn) {
    const int64_t i = best(group, -INFINITY, [&](int64_t j) {
      if (group.gram(j) == 0) return -DBL_MAX;
      return turn == 0 ? group.gram(j) : -group.state[j];
    });
    if (i < 0) return;
    for (int64_t j = team(); j < group.n; j += kTeams) {
      if (j == i || !group.eligible(j) || group.kept(j)) continue;
      const double c = group.similarity(i, j);
      if (leads_team() && group.state[j] < c) group.state[j] = c;
    }
    group.keep(i, turn, 1);
    __syncthreads();
  }
}

__device__ void dpp(const Group& group) {
  double* left = group.state;
  for (int64_t i = threadIdx.x; i < group.n; i += kThreads) {
    left[i] = group.squares[i] > 0 ? group.quality(i) * group.quality(i) : 0.0;
  }
  double scale = 0;
  for (int64_t turn = 0; turn < group.args.k; ++turn) {
    const int64_t i = best(group, 1e-10 * scale, [&](int64_t j) { return left[j]; });
    if (i < 0) return;
    if (turn == 0) scale = left[i];
    double* row = group.rows + turn * group.n;
    const double pivot = sqrt(left[i]);
    for (int64_t j = team(); j < group.n; j += kTeams) {
      if (j == i || !group.eligible(j) || group.kept(j)) continue;
      const double c = group.similarity(i, j);
      if (!leads_team()) continue;
      double rest = group.quality(i) * group.quality(j) * c;
      for (const double* earlier = group.rows; earlier < row; earlier += group.n) rest -= earlier[i] * earlier[j];
      row[j] = rest / pivot;
      left[j] -= row[j] * row[j];
    }
    group.keep(i, turn, 1);
    __syncthreads();
  }
}

struct RandomKey {
  int64_t begin;
  uint64_t seed;
  // the upper 53 bits, which a double holds exactly
  __device__ double operator()(int64_t j) const {
    return -static_cast<double>(mix_bits(seed + static_cast<uint64_t>(begin + j)) >> 11);
  }
};

struct Quality {
  const Group& group;
  __device__ double operator()(int64_t j) const { return group.quality(j); }
};

template <class Key>
__device__ void by_key(const Group& group, const Key& key) {
  for (int64_t turn = 0; turn < group.args.k; ++turn) {
    const int64_t i = best(group, -INFINITY, key);
    if (i < 0) return;
    group.keep(i, turn, 1);
    __syncthreads();
  }
}

// Solve G_PP s = G_P . 1 with one warp; false where G_PP is singular to rounding.
__device__ bool solve(const Group& group, int64_t count) {
  double* factor = group.factor;
  const auto gram = [&](int64_t i, int64_t j) {
    return group.rows[group.passive_slots[i] * group.n + group.passive[j]];
  };
  for (int64_t j = 0; j < count; ++j) {
    double pivot = gram(j, j);
    for (int64_t l = 0; l < j; ++l) pivot -= factor[j * count + l] * factor[j * count + l];
    if (!(pivot > 1e-10 * gram(j, j))) return false;
    const double root = sqrt(pivot);
    for (int64_t i = j + threadIdx.x; i < count; i += 32) {
      double rest = gram(i, j);
      for (int64_t l = 0; l < j; ++l) rest -= factor[i * count + l] * factor[j * count + l];
      factor[i * count + j] = i == j ? root : rest / root;
    }
    __syncwarp();
  }
  for (int64_t i = 0; i < count && threadIdx.x == 0; ++i) {
    double rest = group.state[group.passive[i]];
    for (int64_t l = 0; l < i; ++l) rest -= factor[i * count + l] * group.s[l];
    group.s[i] = rest / factor[i * count + i];
  }
  for (int64_t i = count; i-- > 0 && threadIdx.x == 0;) {
    double rest = group.s[i];
    for (int64_t l = i + 1; l < count; ++l) rest -= factor[l * count + i] * group.s[l];
    group.s[i] = rest / factor[i * count + i];
  }
  __syncwarp();
  return true;
}

// How far one may go from y towards s until the weight at `place` is 0.
__device__ double step_to_zero(const Group& group, int64_t place) {
  return group.y[place] / (group.y[place] - group.s[place]);
}

// Go towards s until a first weight is 0, and take such members out of P; returns how many stay. One thread calls it.
__device__ int64_t retreat(const Group& group, int64_t count) {
  double step = 1;
  for (int64_t i = 0; i < count; ++i) {
    if (group.s[i] <= 0 && step_to_zero(group, i) < step) step = step_to_zero(group, i);
  }
  int64_t stay = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (group.s[i] <= 0 && step_to_zero(group, i) <= step) continue;
    const double y = group.y[i] + step * (group.s[i] - group.y[i]);
    const int64_t slot = group.passive_slots[i];
    group.passive_slots[i] = group.passive_slots[stay];  // free rows come behind those in use
    group.passive_slots[stay] = slot;
    group.passive[stay] = group.passive[i];
    group.y[stay++] = y;
  }
  return stay;
}

// Lawson and Hanson's inner loop with one warp: take `next`, whose row of G is in slots[count], in, and out whoever's
// weight would turn negative. Returns how many are in P then, or -1 where `next` is of no use and all stays as it was.
__device__ int64_t enter(const Group& group, int64_t next, int64_t members) {
  const int lane = threadIdx.x;
  const int64_t tried = members + 1;
  for (int64_t i = lane; i < tried; i += 32) {
    group.passive[i] = i < members ? group.members[i] : next;
    group.passive_slots[i] = group.slots[i];
    group.y[i] = i < members ? group.x[group.members[i]] : 0;
  }
  __syncwarp();
  int64_t count = tried;
  if (!solve(group, count) || !(group.s[count - 1] > 0)) return -1;
  for (;;) {
    double least = group.s[0];
    for (int64_t i = 1; i < count; ++i) least = group.s[i] < least ? group.s[i] : least;
    if (least > 0) break;
    if (lane == 0) count = retreat(group, count);
    __syncwarp();
    count = __shfl_sync(kFullWarp, count, 0);
    if (count == 0 || !solve(group, count)) return -1;
  }
  for (int64_t i = lane; i < members; i += 32) group.x[group.members[i]] = 0;
  __syncwarp();
  for (int64_t i = lane; i < tried; i += 32) {
    group.slots[i] = group.passive_slots[i];
    if (i >= count) continue;
    group.members[i] = group.passive[i];
    group.x[group.passive[i]] = group.s[i];
  }
  return count;
}

__device__ void fill_gram_row(const Group& group, int64_t i, double* row) {
  for (int64_t j = team(); j < group.n; j += kTeams) {
    if (!group.eligible(j)) continue;
    const double product = dot(group.vector(i), group.vector(j), group.args.width);
    if (leads_team()) row[j] = group.advantage(i) * group.advantage(j) * product;
  }
}

// While members are chosen a member's order is -1, or kRefused: tried since the last success, and of no use.
constexpr int64_t kRefused = -2;

__device__ void match(const Group& group) {
  FASTRL_SHARED(int64_t, entered);
  const ChooseRolloutsArgs& args = group.args;
  __syncthreads();
  const double least = 1e-9 * sqrt(dot(group.whole, group.whole, args.width));
  for (int64_t i = team(); i < group.n; i += kTeams) {
    const double target = group.advantage(i) * dot(group.vector(i), group.whole, args.width);
    if (leads_team()) group.state[i] = target;
  }
  for (int64_t i = threadIdx.x; i < group.n; i += kThreads) {
    group.x[i] = 0;
    group.slots[i] = i;
  }
  __syncthreads();
  int64_t members = 0;
  for (int64_t turn = 0; turn < 3 * group.n && members < args.k; ++turn) {
    const int64_t next = best(group, least, [&](int64_t i) {
      const double own = group.gram(i);
      if (args.order[group.begin + i] == kRefused || group.x[i] > 0 || !(own > 0))
        return -static_cast<double>(INFINITY);
      double pull = group.state[i];
      for (int64_t m = 0; m < members; ++m)
        pull -= group.rows[group.slots[m] * group.n + i] * group.x[group.members[m]];
      return pull / sqrt(own);
    });
    if (next < 0) break;
    fill_gram_row(group, next, group.rows + group.slots[members] * group.n);
    __syncthreads();
    if (threadIdx.x < 32) {
      const int64_t count = enter(group, next, members);
      if (threadIdx.x == 0) entered = count;
    }
    __syncthreads();
    const bool success = entered >= 0;
    if (success) members = entered;
    for (int64_t i = threadIdx.x; i < group.n; i += kThreads) {
      if (success || i == next) args.order[group.begin + i] = success ? -1 : kRefused;
    }
  }
  for (int64_t i = threadIdx.x; i < group.n; i += kThreads) args.order[group.begin + i] = -1;
  for (int64_t m = 0; m < members; ++m) group.keep(group.members[m], m, static_cast<float>(group.x[group.members[m]]));
}

__device__ void compare(const Group& group) {
  const ChooseRolloutsArgs& args = group.args;
  const float* weights = args.weights + group.begin;
  __syncthreads();
  add_up(group, group.part, [&](int64_t i) { return static_cast<double>(weights[i]); });
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const double whole = dot(group.whole, group.whole, args.width);
  const double both = dot(group.whole, group.part, args.width);
  const double part = dot(group.part, group.part, args.width);
  if (threadIdx.x != 0) return;
  double sizes = 0, weighted = 0;
  for (int64_t i = 0; i < group.n; ++i) {
    if (!group.eligible(i)) continue;
    const double w = weights[i], own = group.gram(i);
    sizes += own;
    weighted += w * w * own;
  }
  args.fidelity[blockIdx.x] = fidelity_of(whole, both, part, sizes, weighted);
}

// An instance for each rule, so that none takes the registers of another.
template <ChooseRule kRule>
__global__ void __launch_bounds__(kThreads)
    choose_rollouts_kernel(ChooseRolloutsArgs args, int64_t rollouts, double* workspace) {
  const Group group(args, rollouts, workspace, blockIdx.x);
  prepare(group, kRule != ChooseRule::given);
  if (kRule == ChooseRule::maxmin) maxmin(group);
  if (kRule == ChooseRule::dpp) dpp(group);
  if (kRule == ChooseRule::match) match(group);
  if (kRule == ChooseRule::random) by_key(group, RandomKey{group.begin, mix_bits(static_cast<uint64_t>(args.seed))});
  if (kRule == ChooseRule::top_advantage) by_key(group, Quality{group});
  compare(group);
}

template <ChooseRule kRule>
int launch_rule(const ChooseRolloutsArgs& args, int64_t rollouts, double* workspace, void* stream) {
  return launch(choose_rollouts_kernel<kRule>, dim3(static_cast<unsigned>(args.groups)), dim3(kThreads), stream, args,
                rollouts, workspace);
}

}  // namespace

int choose_rollouts(const ChooseRolloutsArgs& args, int64_t rollouts, double* workspace, void* stream) {
  if (args.groups == 0) return cudaSuccess;
  switch (args.rule) {
    case ChooseRule::maxmin:
      return launch_rule<ChooseRule::maxmin>(args, rollouts, workspace, stream);
    case ChooseRule::dpp:
      return launch_rule<ChooseRule::dpp>(args, rollouts, workspace, stream);
    case ChooseRule::match:
      return launch_rule<ChooseRule::match>(args, rollouts, workspace, stream);
    case ChooseRule::random:
      return launch_rule<ChooseRule::random>(args, rollouts, workspace, stream);
    case ChooseRule::top_advantage:
      return launch_rule<ChooseRule::top_advantage>(args, rollouts, workspace, stream);
    case ChooseRule::given:
      return launch_rule<ChooseRule::given>(args, rollouts, workspace, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fastrl::cuda
