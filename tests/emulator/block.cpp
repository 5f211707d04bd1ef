// Never compiled with -fsanitize (see fiber.cpp), so what is done to memory here is invisible to ThreadSanitizer,
// except through malloc, free and memset, which it intercepts: they are called in the main fiber's name only.
#include "block.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulator {
namespace {

constexpr size_t kSharedLimit = 48 * 1024;  // static shared memory of a block
constexpr size_t kMostArrays = 16, kRedZone = 128;
constexpr size_t kArena = kSharedLimit + kMostArrays * kRedZone;  // holds one block's shared memory
const char* const kWarpOpName[] = {"__syncwarp", "__shfl_sync", "__ballot_sync"};

bool same(Where a, Where b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

uint64_t result(Vote vote, const Block& block) {
  switch (vote) {
    case Vote::all:
      return block.votes == block.waiting;
    case Vote::any:
      return block.votes != 0;
    default:
      return block.votes;
  }
}

void complete_barrier(Block* block) {
  for (const Fiber* fiber : block->threads) tsan::release_as(fiber, &block->barrier_token);
  for (const Fiber* fiber : block->threads) tsan::acquire_as(fiber, &block->barrier_token);
  for (Fiber* fiber : block->threads) wake(fiber, result(fiber->vote, *block));
  block->waiting = block->votes = 0;
}

bool in_same_call(const Fiber& a, const Fiber& b) {
  return b.state == State::at_warp_op && a.op == b.op && a.mask == b.mask && same(a.where, b.where);
}

// Wake the lanes of the current fiber's warp operation if all of them are in it. A lane that is elsewhere may still
// come; if it never does, the grid ends as a deadlock.
void try_complete_warp_op(const Fiber& me) {
  Warp& warp = me.block->warps[me.thread / 32];
  Fiber* const* lanes = me.block->threads.data() + me.thread / 32 * 32;
  const unsigned needed = me.mask & warp.existing;
  uint64_t given[32] = {}, ballot = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if (!(needed >> i & 1)) continue;
    if (!in_same_call(me, *lanes[i])) return;
    given[i] = lanes[i]->value;
    ballot |= (given[i] & 1) << i;
  }
  if (me.op == WarpOp::sync) {  // shuffles and votes order no memory
    char* token = &warp.sync_tokens[__builtin_ctz(me.mask)];
    for (unsigned i = 0; i < 32; ++i) {
      if (needed >> i & 1) tsan::release_as(lanes[i], token);
    }
    for (unsigned i = 0; i < 32; ++i) {
      if (needed >> i & 1) tsan::acquire_as(lanes[i], token);
    }
  }
  for (unsigned i = 0; i < 32; ++i) {
    if (!(needed >> i & 1)) continue;
    const bool shuffles = me.op == WarpOp::shuffle;
    if (shuffles && !(needed >> lanes[i]->source & 1)) {
      set_error(text(*lanes[i]) + ": __shfl_sync at " + text(lanes[i]->where) + " reads lane " +
                std::to_string(lanes[i]->source) + ", which is not in it");
    }
    wake(lanes[i], shuffles ? given[lanes[i]->source] : ballot);
  }
}

}  // namespace

std::string text(Where where) { return std::string(where.file) + ":" + std::to_string(where.line); }

std::string text(const Block& block) {
  return "block (" + std::to_string(block.index.x) + ", " + std::to_string(block.index.y) + ", " +
         std::to_string(block.index.z) + ")";
}

std::string text(const Fiber& fiber) { return text(*fiber.block) + " thread " + std::to_string(fiber.thread); }

std::string state_of(const Fiber& fiber) {
  if (fiber.state == State::done) return "exited";
  if (fiber.state == State::at_barrier) return "waiting at __syncthreads " + text(fiber.where);
  char mask[16];
  std::snprintf(mask, sizeof mask, "%08x", fiber.mask);
  return std::string("waiting at ") + kWarpOpName[static_cast<int>(fiber.op)] + " " + text(fiber.where) + " mask " +
         mask;
}

void exit_thread(Fiber* me) {
  Block* block = me->block;
  me->state = State::done;
  block->warps[me->thread / 32].exited |= 1u << (me->thread % 32);
  --block->alive;
  tsan::release(&block->end_token);
  if (block->waiting > 0) set_error(text(*me) + " exited while others of its block wait at __syncthreads");
  for (const Fiber* fiber : block->threads) {
    const bool same_warp = fiber->thread / 32 == me->thread / 32;
    if (same_warp && fiber->state == State::at_warp_op && fiber->mask >> (me->thread % 32) & 1) {
      set_error(text(*me) + " exited while " + kWarpOpName[static_cast<int>(fiber->op)] + " at " + text(fiber->where) +
                " names its lane");
    }
  }
}

Block* start_block(uint3 index, void (*entry)()) {
  Block* block = new Block;
  block->index = index;
  block->shared.reserve(kMostArrays);
  block->arena = static_cast<char*>(std::aligned_alloc(kRedZone, kArena));
  for (volatile char* byte = block->arena; byte < block->arena + kArena; ++byte) *byte = static_cast<char>(0xff);
  asan::forbid(block->arena, kArena);
  tsan::release(&block->start_token);
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  block->alive = count;
  block->warps.resize((count + 31) / 32);
  for (unsigned t = 0; t < count; ++t) {
    Fiber* fiber = take_fiber(entry);
    fiber->block = block;
    fiber->thread = t;
    fiber->thread_index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
    fiber->block_index = block->index;
    block->warps[t / 32].existing |= 1u << (t % 32);
    tsan::acquire_as(fiber, &block->start_token);
    block->threads.push_back(fiber);
    wake(fiber, 0);
  }
  return block;
}

void end_block(Block* block) {
  asan::allow(block->arena, kArena);
  for (Fiber* fiber : block->threads) {
    if (fiber->state != State::done) tsan::release_as(fiber, &block->end_token);  // an error has stopped it
    give_back_fiber(fiber);
  }
  tsan::free_after(&block->end_token, block->arena);
  delete block;
}

int lane() { return static_cast<int>(current_fiber()->thread % 32); }

void* static_shared(Where where, size_t bytes, size_t alignment) {
  Block* block = current_fiber()->block;
  for (const Shared& shared : block->shared) {
    if (same(shared.where, where)) return shared.place;
  }
  if (alignment > kRedZone) fail("shared memory at " + text(where) + " asks for an alignment above 128");
  const size_t offset = (block->arena_used + 2 * kRedZone - 1) / kRedZone * kRedZone;
  if (block->shared.size() == kMostArrays || offset + bytes > kSharedLimit) fail("static shared memory above 48 KiB");
  block->arena_used = offset + bytes;
  asan::allow(block->arena + offset, bytes);
  block->shared.push_back({where, block->arena + offset});
  return block->arena + offset;
}

int block_barrier(Vote vote, int predicate, Where where) {
  Fiber* me = current_fiber();
  Block* block = me->block;
  if (block->alive < block->threads.size()) {
    fail("__syncthreads at " + text(where) + " after other threads of the block exited");
  }
  if (block->waiting == 0) block->first_waiting = me;
  const Fiber& first = *block->first_waiting;
  if (!same(first.where, where) && block->waiting > 0) {
    fail("divergent __syncthreads: here at " + text(where) + ", but thread " + std::to_string(first.thread) + " at " +
         text(first.where));
  }
  me->state = State::at_barrier;
  me->where = where;
  me->vote = vote;
  block->votes += predicate != 0;
  if (++block->waiting == block->threads.size()) complete_barrier(block);
  jump(next_fiber());
  return static_cast<int>(me->value);
}

uint64_t warp_op(WarpOp op, unsigned mask, int source, uint64_t value, Where where) {
  Fiber* me = current_fiber();
  const char* const call = kWarpOpName[static_cast<int>(op)];
  if (!(mask >> lane() & 1)) fail(std::string(call) + " at " + text(where) + ": the calling lane is not in the mask");
  if (mask & me->block->warps[me->thread / 32].exited) {
    fail(std::string(call) + " at " + text(where) + ": the mask names a lane that exited");
  }
  me->state = State::at_warp_op;
  me->op = op;
  me->mask = mask;
  me->source = source;
  me->value = value;
  me->where = where;
  try_complete_warp_op(*me);
  jump(next_fiber());
  return me->value;
}

}  // namespace emulator
