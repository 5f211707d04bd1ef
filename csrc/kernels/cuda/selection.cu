// One block per group. Each n-gram of the group is found or put into a hash table, whose slot becomes its number: a
// slot holds the place of one occurrence, and occurrences are compared token by token, so different n-grams never share
// a number. Which slot an n-gram gets depends on the order in which threads arrive; which n-grams are equal does not,
// and only that is used. |S_i & S_j| is counted by stamping the slots of S_i with i and looking up each n-gram of S_j.
// Memory is linear in the tokens, whatever the sizes of the groups, so nothing has to be known on the host.
#include "kernels/cuda/launch.h"
#include "kernels/selection.h"

namespace fastrl::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int64_t kMillion = 1000000;

struct Jaccard {
  int64_t shared, united;
};

__device__ bool larger(const Jaccard& a, const Jaccard& b) { return a.shared * b.united > b.shared * a.united; }

struct Nearest {
  Jaccard similar;
  int64_t rollout;
};

struct WarpNearest {
  Nearest of[kWarps];
};

// A group's part of the workspace; the arrays start as -1.
struct Group {
  const SelectDiverseArgs& args;
  int64_t begin, end;           // rollouts
  const int64_t* tokens;        // of the group
  int64_t first_token, slots;   // twice the group's tokens
  int *places, *stamps, *sets;  // [slots], [slots], [tokens]: S_i as slots, from cu_seqlens[i] - first_token
  int* sizes;                   // [N]: |S_i|

  __device__ Group(const SelectDiverseArgs& a, int64_t total_tokens, int* workspace, int64_t g)
      : args(a), begin(a.cu_group_sizes[g]), end(a.cu_group_sizes[g + 1]), first_token(a.cu_seqlens[begin]) {
    tokens = a.token_ids + first_token;
    slots = 2 * (a.cu_seqlens[end] - first_token);
    places = workspace + 2 * first_token;
    stamps = workspace + 2 * (total_tokens + first_token);
    sets = workspace + 4 * total_tokens + first_token;
    sizes = workspace + 5 * total_tokens;
  }

  __device__ int64_t start(int64_t i) const { return args.cu_seqlens[i] - first_token; }
  __device__ bool same_class(int64_t i, int64_t j) const { return args.classes[i] == args.classes[j]; }
};

__device__ int64_t slot_hash(const int64_t* ngram, int n, int64_t slots) {
  uint64_t x = 0;
  for (int k = 0; k < n; ++k) {
    x = (x ^ static_cast<uint64_t>(ngram[k])) * 0x9e3779b97f4a7c15ull;
    x ^= x >> 29;
  }
  x *= 0xbf58476d1ce4e5b9ull;
  return static_cast<int64_t>((x >> 33) * static_cast<uint64_t>(slots) >> 31);  // slots <= 2^31, so this fits
}

// The slot of the n-gram at `place`. At most half of the slots are ever taken: the walk ends.
__device__ int find_or_insert(const Group& group, int64_t place) {
  const int n = group.args.ngram;
  const int64_t* ngram = group.tokens + place;
  int64_t slot = slot_hash(ngram, n, group.slots);
  for (;;) {
    const int other = atomicCAS(group.places + slot, -1, static_cast<int>(place));
    if (other == -1) break;
    int k = 0;
    while (k < n && group.tokens[other + k] == ngram[k]) ++k;
    if (k == n) break;
    slot = slot + 1 == group.slots ? 0 : slot + 1;
  }
  return static_cast<int>(slot);
}

// Fill `sets` and `sizes`, member by member: the thread that changes a slot's stamp to j has found a new n-gram of j.
__device__ void make_sets(const Group& group) {
  for (int64_t j = group.begin + threadIdx.x; j < group.end; j += kThreads) group.sizes[j] = 0;
  __syncthreads();
  for (int64_t j = group.begin; j < group.end; ++j) {
    const int64_t last = group.start(j + 1) - group.args.ngram;
    const int member = static_cast<int>(j - group.begin);
    for (int64_t place = group.start(j) + threadIdx.x; place <= last; place += kThreads) {
      const int slot = find_or_insert(group, place);
      if (atomicExch(group.stamps + slot, member) != member) {
        group.sets[group.start(j) + atomicAdd(group.sizes + j, 1)] = slot;
      }
    }
    __syncthreads();
  }
}

// After it a slot's stamp is i if and only if the n-gram is in S_i.
__device__ void stamp(const Group& group, int64_t i) {
  const int* set = group.sets + group.start(i);
  for (int k = threadIdx.x; k < group.sizes[i]; k += kThreads) group.stamps[set[k]] = static_cast<int>(i - group.begin);
  __syncthreads();
}

// J(i, j) with the lanes of one warp, i being stamped.
__device__ Jaccard jaccard(const Group& group, int64_t i, int64_t j) {
  const int* set = group.sets + group.start(j);
  int shared = 0;
  for (int k = threadIdx.x % 32; k < group.sizes[j]; k += 32) {
    shared += group.stamps[set[k]] == static_cast<int>(i - group.begin);
  }
  for (int distance = 16; distance > 0; distance /= 2) shared += __shfl_xor_sync(kFullWarp, shared, distance);
  const int64_t united = static_cast<int64_t>(group.sizes[i]) + group.sizes[j] - shared;
  if (united == 0) return {1, 1};  // two empty answers are the same answer
  return {shared, united};
}

// What one warp says of rollout i: is it too near to a kept member before it?
__device__ bool warp_finds_duplicate(const Group& group, int64_t i) {
  const SelectDiverseArgs& args = group.args;
  const int64_t bound = kMillion - args.tau_millionths;  // 1 - tau
  for (int64_t j = group.begin + (args.seed_only ? 0 : threadIdx.x / 32); j < i; j += args.seed_only ? 1 : kWarps) {
    if (!group.same_class(i, j) || !args.kept[j]) continue;
    const Jaccard similar = jaccard(group, i, j);
    const int64_t left = kMillion * similar.shared, right = bound * similar.united;
    // The first member of a class is kept, so the first j met is the seed.
    if (args.seed_only) return left >= right;
    if (left > right) return true;
  }
  return false;
}

__device__ void walk(const Group& group) {
  const SelectDiverseArgs& args = group.args;
  for (int64_t i = group.begin; i < group.end; ++i) {
    bool duplicate = true;
    if (args.classes[i] >= 0) {
      stamp(group, i);
      duplicate = __syncthreads_or(warp_finds_duplicate(group, i));
    }
    if (threadIdx.x == 0) args.kept[i] = !duplicate;  // read by others only after the barrier in the next stamp()
  }
  __syncthreads();
}

__device__ Nearest warp_nearest(const Group& group, int64_t i) {
  Nearest nearest = {{-1, 1}, -1};
  for (int64_t j = group.begin + threadIdx.x / 32; j < group.end; j += kWarps) {
    if (!group.same_class(i, j) || !group.args.kept[j]) continue;
    const Jaccard similar = jaccard(group, i, j);
    if (larger(similar, nearest.similar)) nearest = {similar, j};
  }
  return nearest;
}

__device__ void represent(const Group& group) {
  FASTRL_SHARED(WarpNearest, warps);
  const SelectDiverseArgs& args = group.args;
  for (int64_t i = group.begin; i < group.end; ++i) {
    if (args.classes[i] < 0 || args.kept[i]) {
      if (threadIdx.x == 0) args.representative[i] = args.kept[i] ? i : -1;
      continue;  // the whole block does
    }
    stamp(group, i);
    const Nearest mine = warp_nearest(group, i);
    if (threadIdx.x % 32 == 0) warps.of[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x != 0) continue;  // until the next barrier, in stamp(), nobody writes to `warps`
    Nearest nearest = warps.of[0];
    for (int w = 1; w < kWarps; ++w) {
      const Nearest other = warps.of[w];
      const bool tie = !larger(other.similar, nearest.similar) && !larger(nearest.similar, other.similar);
      const bool earlier = tie && other.rollout >= 0 && other.rollout < nearest.rollout;
      if (larger(other.similar, nearest.similar) || earlier) nearest = other;
    }
    args.representative[i] = nearest.rollout;
  }
}

__global__ void __launch_bounds__(kThreads)
    select_diverse_kernel(SelectDiverseArgs args, int64_t tokens, int* workspace) {
  const Group group(args, tokens, workspace, blockIdx.x);
  make_sets(group);
  walk(group);
  represent(group);
}

}  // namespace

int select_diverse(const SelectDiverseArgs& args, int64_t tokens, int* workspace, void* stream) {
  if (args.groups == 0) return cudaSuccess;
  const cudaError_t cleared =
      cudaMemsetAsync(workspace, 0xff, 4 * tokens * sizeof(int), static_cast<cudaStream_t>(stream));
  if (cleared != cudaSuccess) return static_cast<int>(cleared);
  return launch(select_diverse_kernel, dim3(static_cast<unsigned>(args.groups)), dim3(kThreads), stream, args, tokens,
                workspace);
}

}  // namespace fastrl::cuda
