// Which rollouts of a group are different enough to be worth a gradient (FastRL's MDAP; algorithms.md 1.2).
//
// Rollout i is the set S_i of the distinct n-grams of token_ids[cu_seqlens[i], cu_seqlens[i + 1]); two rollouts have
// the Jaccard similarity J = |S_i & S_j| / |S_i | S_j|, and 1 where both sets are empty. Within a group (cu_group_sizes
// over rollouts) the members of one class (equal class label >= 0) are walked in index order:
//
//   mdap        keep i unless some kept member of its class has 1 - J < tau
//   seed_only   keep i unless the first member of its class has J >= 1 - tau
//
// The first member is always kept. J is never rounded: with tau in millionths both tests are comparisons of integers,
// so every machine and every thread count keeps the same set. representative[i] is i for a kept rollout; for a pruned
// one the kept member of its class with the largest J (lowest index on ties); -1 for label < 0, which is never kept.
#pragma once
#include <cstdint>

namespace fastrl {

struct SelectDiverseArgs {
  const int64_t* token_ids;       // [T]
  const int64_t* cu_seqlens;      // [N + 1]
  const int64_t* cu_group_sizes;  // [G + 1]
  const int64_t* classes;         // [N]
  int64_t groups;                 // G
  int64_t tau_millionths;         // in [0, 1000000]
  int ngram;                      // n >= 1
  bool seed_only;
  bool* kept;               // [N], out
  int64_t* representative;  // [N], out
};

namespace cpu {
void select_diverse(const SelectDiverseArgs& args, int num_threads);
}
namespace cuda {
// int32 elements of the workspace for `tokens` < 2^30 token ids of `rollouts` rollouts.
constexpr int64_t select_diverse_workspace(int64_t tokens, int64_t rollouts) { return 5 * tokens + rollouts; }
// Asynchronous on `stream` (a cudaStream_t); pointers are device pointers. Returns a cudaError_t.
int select_diverse(const SelectDiverseArgs& args, int64_t tokens, int* workspace, void* stream);
}  // namespace cuda

}  // namespace fastrl
