// The innermost work of row_attention: a block of one head's queries and a block of the keys they ask. The loops over a
// row are in row_attention.cpp, what is done in a block in row_attention_vector.h.
#pragma once
#include <cstdint>

namespace fastrl::cpu {

constexpr int64_t kQueries = 48;  // a whole number of tiles of every width
constexpr int64_t kKeys = 64;     // so that the scores of two blocks leave room in an L1 cache of 48 kB

// Queries, times the scale of the scores, and gradients of their output: `across` [head_dim][kQueries], so that a
// step along head_dim finds the queries of a tile side by side, `along` [rows][head_dim].
struct QueryBlock {
  int64_t rows, head_dim;
  const float *q_across, *q_along, *grad_across, *grad_along;  // the forward pass has q_across alone
};

// Query i sees key j where j <= i + ahead. `across` are panels [head_dim][panel] of as many keys each, zeros behind
// the last; `along` is [count][head_dim].
struct KeyBlock {
  int64_t count, ahead;
  const float *k_across, *v_across, *k_along, *v_along;  // the forward pass has k_across and v_along alone
};

// Of the keys seen so far: the largest score, the sum of e^(score - largest), and the values by these weights
// [kQueries][head_dim].
struct Softmax {
  float largest[kQueries], sum[kQueries];
  float* out;
};

struct BlockGrads {
  const float *lse, *delta;  // [rows] log-sum-exp of the scores; sum of out times its gradient
  float *q, *k, *v;          // [rows][head_dim] of the unscaled scores, [count][head_dim]; added to
};

struct BlockFunctions {
  int64_t panel;  // keys of a panel; divides kKeys and head_dim
  void (*forward)(const QueryBlock&, const KeyBlock&, Softmax&);
  void (*backward)(const QueryBlock&, const KeyBlock&, const BlockGrads&);
};

namespace avx2 {
BlockFunctions row_attention_block();
}
namespace avx512 {
BlockFunctions row_attention_block();
}

}  // namespace fastrl::cpu
