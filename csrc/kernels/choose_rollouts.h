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
#pragma once
#include <cstdint>

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

namespace cpu {
void choose_rollouts(const ChooseRolloutsArgs& args, int num_threads);
}

}  // namespace fastrl
