#include "kernels/selection.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/cpu/parallel.h"

namespace fastrl::cpu {
namespace {

constexpr int64_t kMillion = 1000000;

// Numbers the distinct (prefix, token) pairs it is shown 0, 1, 2, ...: an open-addressing table that compares whole
// keys, so two different n-grams never share a number.
class PairNumbering {
 public:
  explicit PairNumbering(int64_t most_pairs) {
    size_t capacity = 16;
    while (capacity < 2 * static_cast<size_t>(most_pairs)) capacity *= 2;
    numbers_.assign(capacity, -1);
    pairs_.reset(new Pair[capacity]);
  }

  int64_t number(int64_t prefix, int64_t token) {
    const size_t mask = numbers_.size() - 1;
    size_t at = hash(prefix, token) & mask;
    while (numbers_[at] >= 0) {
      if (pairs_[at].prefix == prefix && pairs_[at].token == token) return numbers_[at];
      at = (at + 1) & mask;
    }
    pairs_[at] = {prefix, token};
    numbers_[at] = count_;
    return count_++;
  }

  int64_t count() const { return count_; }

 private:
  struct Pair {
    int64_t prefix, token;
  };

  static size_t hash(int64_t prefix, int64_t token) {
    uint64_t x = static_cast<uint64_t>(prefix) * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(token);
    x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9ull;
    return x ^ (x >> 29);
  }

  std::vector<int32_t> numbers_;   // -1 where free: the only part that every new table has to write
  std::unique_ptr<Pair[]> pairs_;  // not initialised
  int32_t count_ = 0;              // a group has fewer than 2^31 tokens
};

// The members' n-gram sets as bitmaps over the group's own n-gram numbers.
class GroupSets {
 public:
  GroupSets(const SelectDiverseArgs& args, int64_t begin, int64_t end) {
    std::vector<int64_t> numbers, starts{0};
    for (int64_t i = begin; i < end; ++i) {
      numbers.insert(numbers.end(), args.token_ids + args.cu_seqlens[i], args.token_ids + args.cu_seqlens[i + 1]);
      starts.push_back(static_cast<int64_t>(numbers.size()));
    }
    // numbers[p] of an (n)-gram at p becomes the number of the pair (the (n - 1)-gram at p, the token at p + n - 1)
    const std::vector<int64_t> tokens = numbers;
    int64_t distinct = 0;
    for (int order = 1; order <= args.ngram; ++order) {
      PairNumbering numbering(static_cast<int64_t>(tokens.size()));
      for (size_t member = 0; member + 1 < starts.size(); ++member) {
        for (int64_t p = starts[member]; p + order <= starts[member + 1]; ++p) {
          numbers[p] = numbering.number(order == 1 ? 0 : numbers[p], tokens[p + order - 1]);
        }
      }
      distinct = numbering.count();
    }
    words_ = (distinct + 63) / 64;
    bits_.assign(static_cast<size_t>(words_ * (end - begin)), 0);
    sizes_.assign(static_cast<size_t>(end - begin), 0);
    for (int64_t member = 0; member < end - begin; ++member) {
      uint64_t* bits = bits_.data() + member * words_;
      for (int64_t p = starts[member]; p + args.ngram <= starts[member + 1]; ++p) {
        bits[numbers[p] / 64] |= uint64_t{1} << (numbers[p] % 64);
      }
      for (int64_t w = 0; w < words_; ++w) sizes_[member] += __builtin_popcountll(bits[w]);
    }
  }

  struct Jaccard {
    int64_t shared, united;
    bool operator>(const Jaccard& other) const { return shared * other.united > other.shared * united; }
  };

  Jaccard jaccard(int64_t i, int64_t j) const {
    const uint64_t *a = bits_.data() + i * words_, *b = bits_.data() + j * words_;
    int64_t shared = 0;
    for (int64_t w = 0; w < words_; ++w) shared += __builtin_popcountll(a[w] & b[w]);
    const int64_t united = sizes_[i] + sizes_[j] - shared;
    if (united == 0) return {1, 1};  // two empty answers are the same answer
    return {shared, united};
  }

 private:
  int64_t words_ = 0;
  std::vector<uint64_t> bits_;  // [members, words_]
  std::vector<int64_t> sizes_;
};

class GroupSelection {
 public:
  GroupSelection(const SelectDiverseArgs& args, int64_t g)
      : args_(args), begin_(args.cu_group_sizes[g]), end_(args.cu_group_sizes[g + 1]), sets_(args, begin_, end_) {}

  void run() {
    for (int64_t i = begin_; i < end_; ++i) args_.kept[i] = args_.classes[i] >= 0 && !is_duplicate(i);
    for (int64_t i = begin_; i < end_; ++i) args_.representative[i] = nearest_kept(i);
  }

 private:
  bool same_class(int64_t i, int64_t j) const { return args_.classes[i] == args_.classes[j]; }

  bool is_duplicate(int64_t i) const {
    const int64_t bound = kMillion - args_.tau_millionths;  // 1 - tau
    for (int64_t j = begin_; j < i; ++j) {
      if (!same_class(i, j) || !args_.kept[j]) continue;
      const auto similar = sets_.jaccard(i - begin_, j - begin_);
      const int64_t left = kMillion * similar.shared, right = bound * similar.united;
      // The first member of a class is kept, so the first j met is the seed.
      if (args_.seed_only) return left >= right;
      if (left > right) return true;
    }
    return false;
  }

  int64_t nearest_kept(int64_t i) const {
    if (args_.classes[i] < 0) return -1;
    if (args_.kept[i]) return i;
    int64_t nearest = -1;
    GroupSets::Jaccard best{-1, 1};
    for (int64_t j = begin_; j < end_; ++j) {
      if (!same_class(i, j) || !args_.kept[j]) continue;
      const auto similar = sets_.jaccard(i - begin_, j - begin_);
      if (similar > best) {
        best = similar;
        nearest = j;
      }
    }
    return nearest;
  }

  const SelectDiverseArgs& args_;
  const int64_t begin_, end_;
  const GroupSets sets_;
};

}  // namespace

void select_diverse(const SelectDiverseArgs& args, int num_threads) {
  const int64_t rollouts = args.cu_group_sizes[args.groups];
  const int threads = threads_for(args.cu_seqlens[rollouts], num_threads);
  parallel_for(args.groups, threads, [&](int64_t g) { GroupSelection(args, g).run(); });
}

}  // namespace fastrl::cpu
