// Never compiled with -fsanitize (see fiber.cpp), so what the scheduler does to memory is invisible to ThreadSanitizer,
// except through malloc, free and memset, which it intercepts: they are called in the main fiber's name only.
#include "scheduler.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "fiber.h"

namespace emulator {
namespace {

constexpr size_t kSharedLimit = 48 * 1024;  // static shared memory of a block
constexpr size_t kMostArrays = 16, kRedZone = 128;
constexpr size_t kArena = kSharedLimit + kMostArrays * kRedZone;  // holds one block's shared memory
const char* const kWarpOpName[] = {"__syncwarp", "__shfl_sync", "__ballot_sync"};

struct Warp {
  unsigned existing = 0, exited = 0;
  char sync_token = 0;
};

struct Shared {
  Where where;
  char* place;
};

}  // namespace

struct Block {
  uint3 index{};
  std::vector<Fiber*> threads;
  std::vector<Warp> warps;
  unsigned alive = 0, waiting = 0, votes = 0;
  const Fiber* first_waiting = nullptr;
  std::vector<Shared> shared;
  char* arena = nullptr;
  size_t arena_used = 0;
  char start_token = 0, barrier_token = 0, end_token = 0;
};

namespace {

class ReadyQueue {  // a ring that never allocates while fibers run
 public:
  void reset(size_t room) {
    fibers_.assign(room, nullptr);
    head_ = count_ = 0;
  }
  bool empty() const { return count_ == 0; }
  void push(Fiber* fiber) { fibers_[(head_ + count_++) % fibers_.size()] = fiber; }
  Fiber* take(uint64_t which) {
    std::swap(fibers_[(head_ + which % count_) % fibers_.size()], fibers_[head_]);
    Fiber* fiber = fibers_[head_];
    head_ = (head_ + 1) % fibers_.size();
    --count_;
    return fiber;
  }

 private:
  std::vector<Fiber*> fibers_;
  size_t head_ = 0, count_ = 0;
};

Settings settings;
ReadyQueue ready;
std::vector<Block*> finished;
void (*running_kernel)(void*);
void* running_arguments;
std::string error;
uint64_t random_state;
char grid_end_token;  // the main fiber comes after every thread only when the whole grid is done

uint64_t draw() {  // xorshift
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

std::string text(Where where) { return std::string(where.file) + ":" + std::to_string(where.line); }

std::string text(const Block& block) {
  return "block (" + std::to_string(block.index.x) + ", " + std::to_string(block.index.y) + ", " +
         std::to_string(block.index.z) + ")";
}

std::string text(const Fiber& fiber) { return text(*fiber.block) + " thread " + std::to_string(fiber.thread); }

bool same(Where a, Where b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

void set_error(const std::string& message) {
  if (!error.empty()) return;  // the first is the cause
  error = message;
  tsan::release(&grid_end_token);
}

[[noreturn]] void fail(const std::string& message) {
  set_error(text(*current_fiber()) + ": " + message);
  jump(main_fiber());
  std::abort();  // nobody jumps back to a fiber that failed
}

Fiber* next_fiber() {
  if (!error.empty() || ready.empty() || !finished.empty()) return main_fiber();
  return ready.take(settings.seed ? draw() : 0);
}

void wake(Fiber* fiber, uint64_t value) {
  fiber->value = value;
  fiber->state = State::ready;
  ready.push(fiber);
}

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
    for (unsigned i = 0; i < 32; ++i) {
      if (needed >> i & 1) tsan::release_as(lanes[i], &warp.sync_token);
    }
    for (unsigned i = 0; i < 32; ++i) {
      if (needed >> i & 1) tsan::acquire_as(lanes[i], &warp.sync_token);
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

void exit_thread(Fiber* me) {
  Block* block = me->block;
  me->state = State::done;
  block->warps[me->thread / 32].exited |= 1u << (me->thread % 32);
  --block->alive;
  tsan::release(&block->end_token);
  tsan::release(&grid_end_token);
  if (block->waiting > 0) set_error(text(*me) + " exited while others of its block wait at __syncthreads");
  for (const Fiber* fiber : block->threads) {
    const bool same_warp = fiber->thread / 32 == me->thread / 32;
    if (same_warp && fiber->state == State::at_warp_op && fiber->mask >> (me->thread % 32) & 1) {
      set_error(text(*me) + " exited while " + kWarpOpName[static_cast<int>(fiber->op)] + " at " + text(fiber->where) +
                " names its lane");
    }
  }
  if (block->alive == 0) finished.push_back(block);
}

void thread_main() {
  enter_fiber();
  running_kernel(running_arguments);
  exit_thread(current_fiber());
  jump(next_fiber(), true);
  std::abort();
}

Block* start_block(uint64_t id) {
  Block* block = new Block;
  block->index = {static_cast<unsigned>(id % gridDim.x), static_cast<unsigned>(id / gridDim.x % gridDim.y),
                  static_cast<unsigned>(id / gridDim.x / gridDim.y)};
  block->shared.reserve(kMostArrays);
  block->arena = static_cast<char*>(std::aligned_alloc(kRedZone, kArena));
  for (volatile char* byte = block->arena; byte < block->arena + kArena; ++byte) *byte = static_cast<char>(0xff);
  asan::forbid(block->arena, kArena);
  tsan::release(&block->start_token);
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  block->alive = count;
  block->warps.resize((count + 31) / 32);
  for (unsigned t = 0; t < count; ++t) {
    Fiber* fiber = take_fiber(thread_main);
    fiber->block = block;
    fiber->thread = t;
    fiber->thread_index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
    fiber->block_index = block->index;
    block->warps[t / 32].existing |= 1u << (t % 32);
    // The thread comes after the start of its block and after nothing that other blocks do.
    tsan::acquire_as(fiber, &block->start_token);
    block->threads.push_back(fiber);
    ready.push(fiber);
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

std::string state_of(const Fiber& fiber) {
  if (fiber.state == State::done) return "exited";
  if (fiber.state == State::at_barrier) return "waiting at __syncthreads " + text(fiber.where);
  char mask[16];
  std::snprintf(mask, sizeof mask, "%08x", fiber.mask);
  return std::string("waiting at ") + kWarpOpName[static_cast<int>(fiber.op)] + " " + text(fiber.where) + " mask " +
         mask;
}

std::string deadlock(const std::vector<Block*>& resident) {
  std::string message = "deadlock:";
  for (const Block* block : resident) {
    message += " " + text(*block);
    for (unsigned t = 0; t < block->threads.size(); ++t) {  // only where the state changes
      const std::string state = state_of(*block->threads[t]);
      if (t == 0 || state != state_of(*block->threads[t - 1])) {
        message += ", from thread " + std::to_string(t) + " " + state;
      }
    }
  }
  return message;
}

std::string launch_error(dim3 grid, dim3 block) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64) return "a block must have 1 to 1024 threads, z up to 64";
  const bool too_large = grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || too_large) {
    return "a grid must have 1 to 2^31 - 1, 65535 and 65535 blocks";
  }
  return "";
}

std::vector<uint64_t> block_order(uint64_t blocks) {
  std::vector<uint64_t> order(blocks);
  for (uint64_t i = 0; i < blocks; ++i) order[i] = i;
  for (uint64_t i = blocks; settings.seed && i > 1; --i) std::swap(order[i - 1], order[draw() % i]);
  return order;
}

void run_blocks(const std::vector<uint64_t>& order) {
  std::vector<Block*> resident;
  for (size_t next = 0; error.empty();) {
    while (resident.size() < settings.resident && next < order.size()) resident.push_back(start_block(order[next++]));
    if (resident.empty()) break;
    if (ready.empty()) error = deadlock(resident);
    if (error.empty()) jump(next_fiber());
    for (Block* done : finished) {
      resident.erase(std::find(resident.begin(), resident.end(), done));
      end_block(done);
    }
    finished.clear();
  }
  tsan::acquire(&grid_end_token);
  for (Block* stopped : resident) end_block(stopped);
}

}  // namespace

void configure(const Settings& chosen) { settings = chosen; }

int lane() { return static_cast<int>(current_fiber()->thread % 32); }

void may_yield() {
  if (settings.seed == 0 || draw() % 8 != 0) return;
  ready.push(current_fiber());
  jump(next_fiber());
}

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

std::string run(dim3 grid, dim3 block, void (*kernel)(void*), void* arguments) {
  static std::mutex one_grid_at_a_time;
  const std::lock_guard<std::mutex> lock(one_grid_at_a_time);
  error = launch_error(grid, block);
  if (!error.empty()) return error;
  const unsigned threads = block.x * block.y * block.z;
  prepare_fibers(threads);
  gridDim = grid;
  blockDim = block;
  running_kernel = kernel;
  running_arguments = arguments;
  finished.clear();
  finished.reserve(settings.resident);
  ready.reset(threads * settings.resident);
  random_state = (settings.seed + 1) * 0x9e3779b97f4a7c15ull;
  run_blocks(block_order(uint64_t{grid.x} * grid.y * grid.z));
  return error;
}

}  // namespace emulator

extern "C" void emulator_configure(uint64_t seed, int resident) {
  emulator::configure({seed, static_cast<size_t>(resident)});
}
