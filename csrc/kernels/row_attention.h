// Causal attention of a whole packed row in one call: every piece on itself, completions on their shared prompt too.
#pragma once
#include <cstdint>

namespace fastrl {

// Tokens [start, end) of a row, none or more. They ask themselves, causally, and all of an earlier piece of the row,
// their prompt, where `prompt` is its number and not -1. Pieces cover the row in order.
struct RowPiece {
  int64_t start, end, prompt;
};

struct RowAttentionArgs {
  const float* q;          // [tokens, kv_heads * repeats, head_dim]
  const float* k;          // [tokens, kv_heads, head_dim]
  const float* v;          // as k
  const RowPiece* pieces;  // [count]
  int64_t count, kv_heads, repeats, head_dim;
  float scale;
  float* out;  // as q; written by the forward pass, read by the backward pass
  float* lse;  // [tokens, kv_heads * repeats] log-sum-exp of the scaled scores; likewise
};

struct RowAttentionGrads {
  const float* out;  // as q
  float *q, *k, *v;  // as their values; written
};

namespace cpu {
// There is code for heads of a multiple of this size; 0 where the processor has none, and nothing below may be called.
int64_t row_attention_multiple();
// Neither result depends on num_threads.
void row_attention(const RowAttentionArgs& args, int num_threads);
void row_attention_backward(const RowAttentionArgs& args, const RowAttentionGrads& grads, int num_threads);
}  // namespace cpu

}  // namespace fastrl
