// A block of row_attention in registers of the including file's width, in an anonymous namespace for the reason that
// simd.h gives. All five products are made of one tile: kTile rows by two registers of columns stay in registers.
#pragma once
#include "kernels/cpu/row_attention_block.h"
#include "kernels/cpu/vector.h"

namespace fastrl::cpu {
namespace {

constexpr int64_t kPanel = 2 * kWidth;
// With two registers of columns as many rows as the processor has registers for: 32 with AVX-512, 16 with AVX2.
constexpr int64_t kTile = kWidth == 16 ? 12 : 6;
static_assert(kQueries % kTile == 0 && kKeys % kPanel == 0, "blocks hold whole tiles");

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// c[i][0..kPanel) = (c[i][..] if adding) + sum over j < inner of a[i kRow + j kColumn] b[j][0..kPanel), i < M
template <int64_t M, int64_t kRow, int64_t kColumn>
inline void tile(const float* a, const float* b, int64_t b_row, int64_t inner, float* c, int64_t c_row, bool adding) {
  Vector sums[M][2];
  for (int64_t i = 0; i < M; ++i) sums[i][0] = sums[i][1] = all(0.0f);
  for (int64_t j = 0; j < inner; ++j, a += kColumn, b += b_row) {
    const Vector left = load(b), right = load(b + kWidth);
    for (int64_t i = 0; i < M; ++i) {
      const Vector x = all(a[i * kRow]);
      sums[i][0] = fmadd(x, left, sums[i][0]);
      sums[i][1] = fmadd(x, right, sums[i][1]);
    }
  }
  for (int64_t i = 0; i < M; ++i, c += c_row) {
    store(c, adding ? add(load(c), sums[i][0]) : sums[i][0]);
    store(c + kWidth, adding ? add(load(c + kWidth), sums[i][1]) : sums[i][1]);
  }
}

// A tile of `rows` <= M rows
template <int64_t kRow, int64_t kColumn, int64_t M = kTile>
void product(int64_t rows, const float* a, const float* b, int64_t b_row, int64_t inner, float* c, int64_t c_row,
             bool adding) {
  if constexpr (M > 1) {
    if (rows < M) return product<kRow, kColumn, M - 1>(rows, a, b, b_row, inner, c, c_row, adding);
  }
  tile<M, kRow, kColumn>(a, b, b_row, inner, c, c_row, adding);
}

// Keys that query i sees
inline int64_t seen_by(int64_t i, const KeyBlock& keys) {
  const int64_t seen = i + keys.ahead + 1;
  return seen < 0 ? 0 : smaller(seen, keys.count);
}

// c [kQueries][kKeys] = a [head_dim][kQueries]^T times the panels; what no query of a tile sees is left out
void products_with_keys(const float* a, const float* panels, const QueryBlock& queries, const KeyBlock& keys,
                        float* c) {
  for (int64_t j = 0; j < keys.count; j += kPanel) {
    for (int64_t i = 0; i < queries.rows; i += kTile) {
      const int64_t rows = smaller(kTile, queries.rows - i);
      if (j >= seen_by(i + rows - 1, keys)) continue;
      product<1, kQueries>(rows, a + i, panels + j * queries.head_dim, kPanel, queries.head_dim, c + i * kKeys + j,
                           kKeys, false);
    }
  }
}

// c [rows][head_dim] += a [kQueries][kKeys] times b [count][head_dim]
void add_by_query(const float* a, const float* b, const QueryBlock& queries, const KeyBlock& keys, float* c) {
  const int64_t dim = queries.head_dim;
  for (int64_t i = 0; i < queries.rows; i += kTile) {
    const int64_t rows = smaller(kTile, queries.rows - i), seen = seen_by(i + rows - 1, keys);
    if (seen == 0) continue;
    for (int64_t p = 0; p < dim; p += kPanel) {
      product<kKeys, 1>(rows, a + i * kKeys, b + p, dim, seen, c + i * dim + p, dim, true);
    }
  }
}

// c [count][head_dim] += a [kQueries][kKeys]^T times b [rows][head_dim]
void add_by_key(const float* a, const float* b, const QueryBlock& queries, const KeyBlock& keys, float* c) {
  const int64_t dim = queries.head_dim;
  for (int64_t j = 0; j < keys.count; j += kTile) {
    const int64_t first = j > keys.ahead ? j - keys.ahead : 0;
    if (first >= queries.rows) break;
    for (int64_t p = 0; p < dim; p += kPanel) {
      product<1, kKeys>(smaller(kTile, keys.count - j), a + first * kKeys + j, b + first * dim + p, dim,
                        queries.rows - first, c + j * dim + p, dim, true);
    }
  }
}

inline void clear(float* row, int64_t from, int64_t to) {
  for (; from < to; ++from) row[from] = 0.0f;
}

// Scores of one query to their weights, as of the largest score so far; returns what earlier weights are worth then.
inline float soften(float* row, int64_t seen, float& largest, float& sum) {
  const Vector nothing = all(-__builtin_inff());
  Vector most = nothing;
  for (int64_t j = 0; j < seen; j += kWidth) {
    const Vector s = load(row + j);
    most = max(most, seen - j >= kWidth ? s : first_of(s, seen - j, nothing));
  }
  const float before = largest, now = max_of(most);
  largest = now > before ? now : before;
  if (largest == -__builtin_inff()) {  // the difference of two infinities is no number; keys to come have their say
    clear(row, 0, seen);
    return 1.0f;
  }
  Vector total = all(0.0f);
  for (int64_t j = 0; j < seen; j += kWidth) {
    const Vector d = sub(load(row + j), all(largest));
    const Vector weight = exp_ps(seen - j >= kWidth ? d : first_of(d, seen - j, nothing));
    store(row + j, weight);
    total = add(total, weight);
  }
  float earlier[kWidth];
  store(earlier, exp_ps(all(before - largest)));
  sum = sum * earlier[0] + sum_of(total);
  return earlier[0];
}

void forward(const QueryBlock& queries, const KeyBlock& keys, Softmax& state) {
  alignas(64) float scores[kQueries * kKeys];
  products_with_keys(queries.q_across, keys.k_across, queries, keys, scores);
  for (int64_t i = 0; i < queries.rows; ++i) {
    float *row = scores + i * kKeys, *out = state.out + i * queries.head_dim;
    const int64_t seen = seen_by(i, keys);
    if (seen > 0) {
      const Vector earlier = all(soften(row, seen, state.largest[i], state.sum[i]));
      for (int64_t p = 0; p < queries.head_dim; p += kWidth) store(out + p, mul(load(out + p), earlier));
    }
    clear(row, seen, keys.count);
  }
  add_by_query(scores, keys.v_along, queries, keys, state.out);
}

void backward(const QueryBlock& queries, const KeyBlock& keys, const BlockGrads& grads) {
  alignas(64) float weights[kQueries * kKeys], slopes[kQueries * kKeys];
  products_with_keys(queries.q_across, keys.k_across, queries, keys, weights);
  products_with_keys(queries.grad_across, keys.v_across, queries, keys, slopes);
  for (int64_t i = 0; i < queries.rows; ++i) {
    float *weight = weights + i * kKeys, *slope = slopes + i * kKeys;
    const int64_t seen = seen_by(i, keys);
    for (int64_t j = 0; j < seen; j += kWidth) {
      const Vector w = exp_ps(sub(load(weight + j), all(grads.lse[i])));
      store(weight + j, w);
      store(slope + j, mul(w, sub(load(slope + j), all(grads.delta[i]))));
    }
    clear(weight, seen, keys.count);
    clear(slope, seen, keys.count);
  }
  add_by_key(weights, queries.grad_along, queries, keys, grads.v);
  add_by_key(slopes, queries.q_along, queries, keys, grads.k);
  add_by_query(slopes, keys.k_along, queries, keys, grads.q);
}

}  // namespace
}  // namespace fastrl::cpu
