// What each rollout's reward says relative to its group.
//
// A group is rewards[b, e) with b = cu_group_sizes[g], e = cu_group_sizes[g + 1]; its graded members are those whose
// reward is not NaN. With n graded members, mean mu and M2 = sum (r - mu)^2, in float64:
//
//   advantage = (r - mu) / (sqrt(M2 / (n - ddof)) + eps)     divide_by_std
//             = (r - mu) * n / (n - 1)                       leave_one_out: r minus the mean of the other members
//             = r - mu                                       neither
//
// A group is dead when n < 2 or min == max: every advantage is then exactly 0. The test is on the rewards themselves,
// because a mean of eight float32 0.1 is not 0.1 and (r - mu) / eps would be a large push out of nothing.
// An ungraded member's advantage is 0.
#pragma once
#include <cstdint>

namespace fastrl {

struct GroupAdvantageArgs {
  const double* rewards;          // [N]
  const int64_t* cu_group_sizes;  // [G + 1]
  int64_t groups;                 // G
  bool divide_by_std;
  bool leave_one_out;
  int ddof;           // 0 or 1
  double eps;         // outside the root
  float* advantages;  // [N], out
  bool* dead;         // [G], out
};

namespace cpu {
// Returns whether all rewards are finite or NaN; if not, the advantages of their groups mean nothing.
bool group_advantage(const GroupAdvantageArgs& args, int num_threads);
}  // namespace cpu
namespace cuda {
// Asynchronous on `stream` (a cudaStream_t); pointers are device pointers. Returns a cudaError_t.
int group_advantage(const GroupAdvantageArgs& args, void* stream);
}  // namespace cuda

}  // namespace fastrl
