#include "kernels/row_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/row_attention_block.h"
#include "kernels/cpu/simd.h"

namespace fastrl::cpu {
namespace {

// Slices of the queries that the backward pass makes at least, all key heads together: enough for a few threads. More
// would be more sums of keys to add up; a number of the threads would make the sums depend on it.
constexpr int64_t kSlices = 8;

// Memory for floats, on a cache line's border and not set to anything.
class Floats {
 public:
  explicit Floats(int64_t count) : data_(static_cast<float*>(::operator new(4 * count, kAlignment))) {}
  float* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<float, Free> data_;
};

BlockFunctions block_functions([[maybe_unused]] int64_t head_dim) {
#ifdef FASTRL_WITH_AVX2
  if (use_avx512() && head_dim % avx512::row_attention_block().panel == 0) return avx512::row_attention_block();
  if (use_avx2()) return avx2::row_attention_block();
#endif
  return {0, nullptr, nullptr};
}

// Neighbouring queries of one piece, kQueries at most.
struct Block {
  int64_t piece, start, rows;
};

// The keys of one head: `along` [tokens][head_dim], `across` panels [head_dim][panel] that start anew at every piece.
struct Keys {
  Floats along, across;
};

class Row {
 public:
  Row(const RowAttentionArgs& args, int num_threads)
      : args_(args), functions_(block_functions(args.head_dim)), num_threads_(num_threads) {
    for (int64_t number = 0; number < args.count; ++number) {
      const RowPiece& piece = args.pieces[number];
      panels_start_.push_back(padded_);
      padded_ += (piece.end - piece.start + functions_.panel - 1) / functions_.panel * functions_.panel;
      for (int64_t start = piece.start; start < piece.end; start += kQueries) {
        blocks_.push_back({number, start, std::min(kQueries, piece.end - start)});
      }
    }
  }

  const BlockFunctions& functions() const { return functions_; }
  const std::vector<Block>& blocks() const { return blocks_; }
  int64_t heads() const { return args_.kv_heads * args_.repeats; }
  int64_t tokens() const { return args_.count == 0 ? 0 : args_.pieces[args_.count - 1].end; }
  int64_t offset_of(int64_t token, int64_t head) const { return (token * heads() + head) * args_.head_dim; }

  // Keys that a query of the block sees on average, times its queries
  int64_t cost_of(const Block& block) const {
    const RowPiece& piece = args_.pieces[block.piece];
    const int64_t prompt = piece.prompt < 0 ? 0 : length_of(piece.prompt);
    return block.rows * (prompt + block.start - piece.start + (block.rows + 1) / 2);
  }

  // x [tokens, kv_heads, head_dim] in the layouts that are asked for, all heads behind each other
  Keys keys_of(const float* x, bool along, bool across) const {
    const int64_t dim = args_.head_dim;
    Keys keys{Floats(along ? args_.kv_heads * tokens() * dim : 0), Floats(across ? args_.kv_heads * padded_ * dim : 0)};
    parallel_for(args_.kv_heads * args_.count, num_threads_, [&](int64_t i) {
      const int64_t head = i / args_.count, number = i % args_.count;
      const RowPiece& piece = args_.pieces[number];
      const float* from = x + (piece.start * args_.kv_heads + head) * dim;
      const int64_t count = piece.end - piece.start, step = args_.kv_heads * dim;
      if (along) {
        float* to = keys.along.get() + (head * tokens() + piece.start) * dim;
        for (int64_t t = 0; t < count; ++t) std::memcpy(to + t * dim, from + t * step, 4 * dim);
      }
      if (across) fill_panels(from, count, step, keys.across.get() + (head * padded_ + panels_start_[number]) * dim);
    });
    return keys;
  }

  // visit(first token, KeyBlock) for all keys that a block of queries asks, of one key head; null stays null
  template <class Visit>
  void each_key_block(const Block& block, int64_t kv_head, const Keys& k, const Keys& v, const Visit& visit) const {
    const RowPiece& piece = args_.pieces[block.piece];
    const auto visit_piece = [&](int64_t number, int64_t count, int64_t ahead) {
      const int64_t start = args_.pieces[number].start, dim = args_.head_dim;
      for (int64_t j = 0; j < count; j += kKeys) {
        const int64_t along = (kv_head * tokens() + start + j) * dim;
        const int64_t across = (kv_head * padded_ + panels_start_[number] + j) * dim;
        visit(start + j, KeyBlock{std::min(kKeys, count - j), ahead - j, k.across.get() + across,
                                  v.across.get() + across, k.along.get() + along, v.along.get() + along});
      }
    };
    if (piece.prompt >= 0) visit_piece(piece.prompt, length_of(piece.prompt), length_of(piece.prompt));
    const int64_t before = block.start - piece.start;
    visit_piece(block.piece, before + block.rows, before);
  }

 private:
  int64_t length_of(int64_t number) const { return args_.pieces[number].end - args_.pieces[number].start; }

  void fill_panels(const float* from, int64_t count, int64_t step, float* to) const {
    const int64_t panel = functions_.panel;
    for (int64_t first = 0; first < count; first += panel, to += panel * args_.head_dim) {
      const int64_t filled = std::min(panel, count - first);
      for (int64_t d = 0; d < args_.head_dim; ++d) {
        for (int64_t t = 0; t < filled; ++t) to[d * panel + t] = from[(first + t) * step + d];
        std::fill(to + d * panel + filled, to + (d + 1) * panel, 0.0f);
      }
    }
  }

  const RowAttentionArgs& args_;
  BlockFunctions functions_;
  int num_threads_;
  std::vector<int64_t> panels_start_;  // of each piece, in tokens
  std::vector<Block> blocks_;
  int64_t padded_ = 0;  // tokens of all panels
};

// `rows` vectors, `step` floats apart and times `factor`, as [head_dim][kQueries] and, where wanted, [rows][head_dim]
void copy_queries(const float* from, int64_t rows, int64_t step, int64_t head_dim, float factor, float* across,
                  float* along) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < head_dim; ++d) across[d * kQueries + i] = factor * from[i * step + d];
    if (along == nullptr) continue;
    for (int64_t d = 0; d < head_dim; ++d) along[i * head_dim + d] = factor * from[i * step + d];
  }
}

void attend(const RowAttentionArgs& args, const Row& row, const Keys& k, const Keys& v, const Block& block,
            int64_t head) {
  const int64_t dim = args.head_dim, first = row.offset_of(block.start, head), step = row.heads() * dim;
  Floats across(kQueries * dim), out(kQueries * dim);
  copy_queries(args.q + first, block.rows, step, dim, args.scale, across.get(), nullptr);
  std::fill(out.get(), out.get() + kQueries * dim, 0.0f);
  Softmax state;
  std::fill(state.largest, state.largest + kQueries, -std::numeric_limits<float>::infinity());
  std::fill(state.sum, state.sum + kQueries, 0.0f);
  state.out = out.get();
  const QueryBlock queries{block.rows, dim, across.get(), nullptr, nullptr, nullptr};
  row.each_key_block(block, head / args.repeats, k, v,
                     [&](int64_t, const KeyBlock& keys) { row.functions().forward(queries, keys, state); });
  for (int64_t i = 0; i < block.rows; ++i) {
    for (int64_t d = 0; d < dim; ++d) args.out[first + i * step + d] = out.get()[i * dim + d] / state.sum[i];
    args.lse[(block.start + i) * row.heads() + head] = state.largest[i] + std::log(state.sum[i]);
  }
}

// dk and dv [tokens][head_dim] of the block's key head are added to.
void attend_backward(const RowAttentionArgs& args, const RowAttentionGrads& grads, const Row& row, const Keys& k,
                     const Keys& v, const Block& block, int64_t head, float* dk, float* dv) {
  const int64_t dim = args.head_dim, first = row.offset_of(block.start, head), step = row.heads() * dim;
  Floats memory(5 * kQueries * dim);
  float* part[5];
  for (int i = 0; i < 5; ++i) part[i] = memory.get() + i * kQueries * dim;
  copy_queries(args.q + first, block.rows, step, dim, args.scale, part[0], part[1]);
  copy_queries(grads.out + first, block.rows, step, dim, 1.0f, part[2], part[3]);
  float* dq = part[4];
  std::fill(dq, dq + kQueries * dim, 0.0f);
  float lse[kQueries], delta[kQueries];
  for (int64_t i = 0; i < block.rows; ++i) {
    lse[i] = args.lse[(block.start + i) * row.heads() + head];
    delta[i] = 0.0f;
    for (int64_t d = 0; d < dim; ++d) delta[i] += part[3][i * dim + d] * args.out[first + i * step + d];
  }
  const QueryBlock queries{block.rows, dim, part[0], part[1], part[2], part[3]};
  row.each_key_block(block, head / args.repeats, k, v, [&](int64_t token, const KeyBlock& keys) {
    row.functions().backward(queries, keys, {lse, delta, dq, dk + token * dim, dv + token * dim});
  });
  for (int64_t i = 0; i < block.rows; ++i) {
    for (int64_t d = 0; d < dim; ++d) grads.q[first + i * step + d] = args.scale * dq[i * dim + d];
  }
}

// Borders of slices of the blocks, about equal in cost
std::vector<size_t> cut(const Row& row, int64_t slices) {
  int64_t total = 0, done = 0;
  for (const Block& block : row.blocks()) total += row.cost_of(block);
  std::vector<size_t> borders{0};
  for (size_t i = 0; i < row.blocks().size(); ++i) {
    done += row.cost_of(row.blocks()[i]);
    while (static_cast<int64_t>(borders.size()) < slices &&
           done * slices >= total * static_cast<int64_t>(borders.size())) {
      borders.push_back(i + 1);
    }
  }
  borders.resize(slices + 1, row.blocks().size());
  borders.back() = row.blocks().size();
  return borders;
}

// to [tokens, kv_heads, head_dim] = the sum over slices of parts [kv_heads][slices][tokens][head_dim], in order
void add_up(const RowAttentionArgs& args, int64_t tokens, int64_t slices, const float* parts, float* to, int threads) {
  const int64_t dim = args.head_dim;
  parallel_for(tokens, threads, [&](int64_t t) {
    for (int64_t head = 0; head < args.kv_heads; ++head) {
      const float* part = parts + (head * slices * tokens + t) * dim;
      float* sum = to + (t * args.kv_heads + head) * dim;
      std::memcpy(sum, part, 4 * dim);
      for (int64_t s = 1; s < slices; ++s) {
        for (int64_t d = 0; d < dim; ++d) sum[d] += part[s * tokens * dim + d];
      }
    }
  });
}

}  // namespace

int64_t row_attention_multiple() {
#ifdef FASTRL_WITH_AVX2
  if (use_avx2()) return avx2::row_attention_block().panel;
#endif
  return 0;
}

void row_attention(const RowAttentionArgs& args, int num_threads) {
  const Row row(args, num_threads);
  const Keys k = row.keys_of(args.k, false, true), v = row.keys_of(args.v, true, false);
  const int64_t blocks = static_cast<int64_t>(row.blocks().size());
  parallel_for(blocks * row.heads(), num_threads,
               [&](int64_t i) { attend(args, row, k, v, row.blocks()[i % blocks], i / blocks); });
}

void row_attention_backward(const RowAttentionArgs& args, const RowAttentionGrads& grads, int num_threads) {
  const Row row(args, num_threads);
  const Keys k = row.keys_of(args.k, true, true), v = row.keys_of(args.v, false, true);
  const int64_t slices = (kSlices + args.kv_heads - 1) / args.kv_heads, size = row.tokens() * args.head_dim;
  const std::vector<size_t> borders = cut(row, slices);
  const Floats dk(args.kv_heads * slices * size), dv(args.kv_heads * slices * size);
  parallel_for(
      args.kv_heads * slices, num_threads,
      [&](int64_t i) {
        std::fill(dk.get() + i * size, dk.get() + (i + 1) * size, 0.0f);
        std::fill(dv.get() + i * size, dv.get() + (i + 1) * size, 0.0f);
        for (size_t b = borders[i % slices]; b < borders[i % slices + 1]; ++b) {
          for (int64_t head = i / slices * args.repeats; head < (i / slices + 1) * args.repeats; ++head) {
            attend_backward(args, grads, row, k, v, row.blocks()[b], head, dk.get() + i * size, dv.get() + i * size);
          }
        }
      },
      1);
  add_up(args, row.tokens(), slices, dk.get(), grads.k, num_threads);
  add_up(args, row.tokens(), slices, dv.get(), grads.v, num_threads);
}

}  // namespace fastrl::cpu
