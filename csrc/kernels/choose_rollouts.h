// Which rollouts of a group stand for all of it, judged by vectors v_i and advantages A_i.
//
// Member i's share of the gradient is g_i = A_i v_i; G_ij = A_i A_j <v_i, v_j> in float64. A member with a number in
// v_i or A_i that is not finite is never kept. Similarity c_ij = sign(A_i A_j) <v_i, v_j> / (|v_i| |v_j|) cut to [-1,
// 1], and 0 where a vector or an advantage is 0. At most k members are kept, one after the other; ties go to the lowest
// index.
//
//   maxmin         first the largest |g|, then the member whose largest similarity to a kept one is smallest;
//                  members with g = 0 only when no other is left
//   dpp            greedy determinant of L_ij = |A_i A_j| c_ij: incremental Cholesky; stops where the largest remaining
//                  pivot is not above 1e-10 of the largest of all: what is left lies in the span of the kept ones
//   match          greedy non-negative least squares |sum_i g_i - sum_kept w_i g_i|: Lawson and Hanson's method with at
//                  most k members in the passive set; its w are the weights. It stops early where no member helps
//   random         the k smallest mix(mix(seed) + i), i the rollout's index over all groups
//   top_advantage  the k largest |A|
//   given          nothing is chosen: `weights` comes filled in, and only the fidelity is computed
//
// Weights are 1 but for match and given, 0 where not kept. order is the turn in which a member was kept, from 0; -1
// where it was not. fidelity = cos(sum over all g_i, sum over kept w_i g_i): how much of the group's push is left; 1
// where both sums are 0, 0 where one is. Everything is float64 in one order: the same answer on every machine.
//
// An inner product <a, b> is sixteen float64 sums, sum k over the elements k, k + 16, k + 32 ..., of which those 8
// apart are added, then those 4, 2 and 1 apart. sum over all g_i is one vector, added up in the order of i; inner
// products with it take the place of double sums over G.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define FASTRL_BOTH __host__ __device__
#else
#define FASTRL_BOTH
#endif

namespace fastrl {

enum class ChooseRule : int { maxmin = 0, dpp = 1, match = 2, random = 3, top_advantage = 4, given = 5 };

struct ChooseRolloutsArgs {
  const float* vectors;           // [N, width]
  const float* advantages;        // [N]
  const int64_t* cu_group_sizes;  // [G + 1]
  int64_t groups;                 // G
  int64_t width;
  ChooseRule rule;
  int64_t k;  // >= 0
  int64_t seed;
  float* weights;    // [N], out (in for given)
  int64_t* order;    // [N], out
  double* fidelity;  // [G], out
};

constexpr int kProductSums = 16;

// The similarity c of two members from their inner product, squared lengths and the product of their advantages.
FASTRL_BOTH inline double similarity_of(double product, double square_i, double square_j, double advantages) {
  const double sizes = std::sqrt(square_i) * std::sqrt(square_j);
  if (sizes == 0 || advantages == 0) return 0;
  const double c = product / sizes, cut = c > 1 ? 1 : c < -1 ? -1 : c;
  return advantages > 0 ? cut : -cut;
}

// The fidelity from the inner products of the sum `whole` over all g_i with itself and with the sum `part` over the
// kept w_i g_i; `sizes` and `weighted` are the sums of their squared terms.
FASTRL_BOTH inline double fidelity_of(double whole, double both, double part, double sizes, double weighted) {
  // a sum that cancels to nothing leaves rounding, which is no direction
  const bool no_whole = !(whole > 1e-12 * sizes), no_part = !(part > 1e-12 * weighted);
  if (no_whole || no_part) return no_whole && no_part ? 1 : 0;
  const double cosine = both / (std::sqrt(whole) * std::sqrt(part));
  return cosine > 1 ? 1 : cosine < -1 ? -1 : cosine;
}

namespace cpu {
void choose_rollouts(const ChooseRolloutsArgs& args, int num_threads);
}
namespace cuda {
// float64 elements of the workspace for `rollouts` rollouts in `groups` groups; k <= rollouts.
constexpr int64_t choose_rollouts_workspace(ChooseRule rule, int64_t rollouts, int64_t groups, int64_t width,
                                            int64_t k) {
  const int64_t tables = rule == ChooseRule::match ? 2 : rule == ChooseRule::dpp ? 1 : 0;
  return rollouts * (9 + tables * k) + 2 * groups * width;
}
// Asynchronous on `stream` (a cudaStream_t); pointers are device pointers. Returns a cudaError_t. The workspace need
// not be cleared.
int choose_rollouts(const ChooseRolloutsArgs& args, int64_t rollouts, double* workspace, void* stream);
}  // namespace cuda

}  // namespace fastrl
