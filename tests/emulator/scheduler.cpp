// Never compiled with -fsanitize: the same object serves plain, ASan and TSan libraries and finds the sanitizers' fiber
// hooks as weak symbols. What the scheduler itself does to memory is therefore invisible to ThreadSanitizer, except
// through malloc, free and memset, which it intercepts: none of them is called in the name of a CUDA thread.
#include "scheduler.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

extern "C" {
#define WEAK __attribute__((weak))
WEAK void __sanitizer_start_switch_fiber(void**, const void*, size_t);
WEAK void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
WEAK void __asan_poison_memory_region(const volatile void*, size_t);
WEAK void __asan_unpoison_memory_region(const volatile void*, size_t);
WEAK void* __tsan_get_current_fiber();
WEAK void* __tsan_create_fiber(unsigned);
WEAK void __tsan_switch_to_fiber(void*, unsigned);
WEAK void __tsan_acquire(void*);
WEAK void __tsan_release(void*);
void emulator_switch_stack(void** save, void* to);
}

// Keep the callee-saved registers on the old stack, change stacks, take them from the new one.
asm(".text\n.globl emulator_switch_stack\n.type emulator_switch_stack,@function\nemulator_switch_stack:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size emulator_switch_stack,.-emulator_switch_stack\n");

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {
namespace {

constexpr size_t kStack = 128 * 1024, kGuard = 4096;
constexpr size_t kArena = 232 * 1024, kRedZone = 128;  // an arena holds one block's shared memory
constexpr size_t kSharedLimit = 48 * 1024;             // static shared memory of a block
const char* const kWarpOpName[] = {"__syncwarp", "__shfl_sync", "__ballot_sync"};

enum class State { ready, at_barrier, at_warp_op, done };

struct Block;

struct Fiber {
  char* stack = nullptr;
  size_t stack_size = 0;
  void *stack_pointer = nullptr, *asan_stack = nullptr, *tsan = nullptr;
  Block* block = nullptr;
  unsigned thread = 0;  // in its block
  uint3 index{};
  State state = State::ready;
  Where where{"", 0};
  WarpOp op = WarpOp::sync;
  unsigned mask = 0;
  int source = 0;
  uint64_t value = 0;  // given to, then returned by a warp operation or vote
};

struct Warp {
  unsigned existing = 0, exited = 0;
  char token = 0;
};

struct Shared {
  Where where;
  void* place;
};

struct Block {
  uint3 index{};
  std::vector<Fiber*> threads;
  std::vector<Warp> warps;
  unsigned alive = 0, waiting = 0, votes = 0;
  const Fiber* first_waiting = nullptr;
  std::vector<Shared> shared;
  char* arena = nullptr;
  size_t arena_used = 0;
  // What TSan's happens-before edges are hung on.
  char start_token = 0, barrier_token = 0, end_token = 0;
};

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

Fiber main_fiber, *current = &main_fiber;
std::deque<Fiber*> idle;  // each with a stack and a TSan identity for good; the longest idle is used next
ReadyQueue ready;
std::vector<Block*> finished;
void (*running_kernel)(void*);
void* running_arguments;
std::string error;
uint64_t random_state;
void* tsan_janitor;   // frees arenas: it comes after the block's threads, and main does not learn of them
char tsan_end_token;  // main comes after every thread once the whole grid is done

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

void set_error(const std::string& message) {
  if (!error.empty()) return;  // the first is the cause
  error = message;
  if (__tsan_release) __tsan_release(&tsan_end_token);
}

void in_the_name_of(const Fiber* fiber, void (*edge)(void*), void* token) {
  __tsan_switch_to_fiber(fiber->tsan, 1);
  edge(token);
  __tsan_switch_to_fiber(current->tsan, 1);
}

void jump(Fiber* to, bool for_ever = false) {
  Fiber* from = current;
  if (to == from) return;
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &from->asan_stack, to->stack, to->stack_size);
  }
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to->tsan, 1);  // 1: a switch orders no memory
  current = to;
  if (to != &main_fiber) {
    threadIdx = to->index;
    blockIdx = to->block->index;
  }
  emulator_switch_stack(&from->stack_pointer, to->stack_pointer);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(from->asan_stack, nullptr, nullptr);
}

Fiber* next_fiber() {
  if (!error.empty() || ready.empty() || !finished.empty()) return &main_fiber;
  return ready.take(settings().seed ? draw() : 0);
}

void wake(Fiber* fiber, uint64_t value) {
  fiber->value = value;
  fiber->state = State::ready;
  ready.push(fiber);
}

[[noreturn]] void fail(const std::string& message) {
  set_error(text(*current) + ": " + message);
  jump(&main_fiber);
  std::abort();  // nobody switches back to a fiber that failed
}

uint64_t vote_result(const Fiber& fiber) {
  const Block& block = *fiber.block;
  switch (static_cast<Vote>(fiber.source)) {
    case Vote::all:
      return block.votes == block.waiting;
    case Vote::any:
      return block.votes != 0;
    default:
      return block.votes;
  }
}

void complete_barrier(Block* block) {
  if (__tsan_release) {
    for (Fiber* fiber : block->threads) in_the_name_of(fiber, __tsan_release, &block->barrier_token);
    for (Fiber* fiber : block->threads) in_the_name_of(fiber, __tsan_acquire, &block->barrier_token);
  }
  for (Fiber* fiber : block->threads) wake(fiber, vote_result(*fiber));
  block->waiting = block->votes = 0;
}

bool in_same_call(const Fiber& a, const Fiber& b) {
  return b.state == State::at_warp_op && a.op == b.op && a.mask == b.mask && a.where.line == b.where.line &&
         std::strcmp(a.where.file, b.where.file) == 0;
}

// Wake the lanes of the current fiber's warp operation if all of them are in it. A lane that is elsewhere may still
// come; if it never does, the grid ends as a deadlock.
void try_complete_warp_op() {
  Block* block = current->block;
  Warp& warp = block->warps[current->thread / 32];
  Fiber** lanes = block->threads.data() + current->thread / 32 * 32;
  const unsigned needed = current->mask & warp.existing;
  uint64_t given[32] = {}, ballot = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if (!(needed >> i & 1)) continue;
    if (!in_same_call(*current, *lanes[i])) return;
    given[i] = lanes[i]->value;
    ballot |= (given[i] & 1) << i;
  }
  const bool orders_memory = current->op == WarpOp::sync;  // shuffles and votes do not
  for (auto edge : {__tsan_release, __tsan_acquire}) {
    for (unsigned i = 0; i < 32 && edge && orders_memory; ++i) {
      if (needed >> i & 1) in_the_name_of(lanes[i], edge, &warp.token);
    }
  }
  for (unsigned i = 0; i < 32; ++i) {
    if (!(needed >> i & 1)) continue;
    const bool shuffles = current->op == WarpOp::shuffle;
    if (shuffles && !(needed >> lanes[i]->source & 1)) {
      set_error(text(*lanes[i]) + ": __shfl_sync at " + text(lanes[i]->where) + " reads lane " +
                std::to_string(lanes[i]->source) + ", which is not in it");
    }
    wake(lanes[i], shuffles ? given[lanes[i]->source] : ballot);
  }
}

void exit_thread() {
  Block* block = current->block;
  current->state = State::done;
  block->warps[current->thread / 32].exited |= 1u << (current->thread % 32);
  --block->alive;
  if (__tsan_release) {
    __tsan_release(&block->end_token);
    __tsan_release(&tsan_end_token);
  }
  if (block->waiting > 0) set_error(text(*current) + " exited while others of its block wait at __syncthreads");
  for (const Fiber* fiber : block->threads) {
    const bool same_warp = fiber->thread / 32 == current->thread / 32;
    if (same_warp && fiber->state == State::at_warp_op && fiber->mask >> (current->thread % 32) & 1) {
      set_error(text(*current) + " exited while " + kWarpOpName[static_cast<int>(fiber->op)] + " at " +
                text(fiber->where) + " names its lane");
    }
  }
  if (block->alive == 0) finished.push_back(block);
}

void fiber_main() {
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
  running_kernel(running_arguments);
  exit_thread();
  jump(next_fiber(), true);
  std::abort();
}

void grow_idle(size_t wanted) {
  while (idle.size() < wanted) {  // 64 stacks at once, each with a guard page below it
    constexpr size_t each = kStack + kGuard;
    void* pages =
        mmap(nullptr, 64 * each, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) throw Error("no memory for stacks");
    for (int i = 0; i < 64; ++i) {
      char* low = static_cast<char*>(pages) + i * each;
      mprotect(low, kGuard, PROT_NONE);
      Fiber* fiber = new Fiber;
      fiber->stack = low + kGuard;
      fiber->stack_size = kStack;
      if (__tsan_create_fiber) fiber->tsan = __tsan_create_fiber(0);
      idle.push_back(fiber);
    }
  }
}

Fiber* start_fiber() {
  if (idle.empty()) grow_idle(1);
  Fiber* fiber = idle.front();
  idle.pop_front();
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(fiber->stack, kStack);
  // What emulator_switch_stack finds: six registers, then where to return to, on a stack aligned as after a call.
  void** top = reinterpret_cast<void**>(fiber->stack + kStack) - 2;
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(fiber_main);
  std::fill(top - 8, top - 2, nullptr);
  fiber->stack_pointer = top - 8;
  fiber->asan_stack = nullptr;
  fiber->state = State::ready;
  return fiber;
}

Block* start_block(uint64_t id) {
  Block* block = new Block;
  block->index = {static_cast<unsigned>(id % gridDim.x), static_cast<unsigned>(id / gridDim.x % gridDim.y),
                  static_cast<unsigned>(id / gridDim.x / gridDim.y)};
  block->shared.reserve(64);
  block->arena = static_cast<char*>(std::aligned_alloc(4096, kArena));
  if (block->arena == nullptr) throw Error("no memory");
  volatile char* bytes = block->arena;  // volatile: no call of memset, which TSan would see
  for (size_t i = 0; i < kSharedLimit + 64 * kRedZone; ++i) bytes[i] = static_cast<char>(0xff);
  if (__asan_poison_memory_region) __asan_poison_memory_region(block->arena, kArena);
  if (__tsan_release) __tsan_release(&block->start_token);
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  block->alive = count;
  block->warps.resize((count + 31) / 32);
  for (unsigned t = 0; t < count; ++t) {
    Fiber* fiber = start_fiber();
    fiber->block = block;
    fiber->thread = t;
    fiber->index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
    block->warps[t / 32].existing |= 1u << (t % 32);
    // The start of the block, and nothing else: a thread does not come after the blocks that ran before it.
    if (__tsan_acquire) in_the_name_of(fiber, __tsan_acquire, &block->start_token);
    block->threads.push_back(fiber);
    ready.push(fiber);
  }
  return block;
}

void end_block(Block* block) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(block->arena, kArena);
  if (__tsan_switch_to_fiber) {
    for (const Fiber* fiber : block->threads) {  // those an error has stopped have not said that they are done
      if (fiber->state != State::done) in_the_name_of(fiber, __tsan_release, &block->end_token);
    }
    __tsan_switch_to_fiber(tsan_janitor, 1);
    __tsan_acquire(&block->end_token);
  }
  std::free(block->arena);
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(current->tsan, 1);
  idle.insert(idle.end(), block->threads.begin(), block->threads.end());
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

void check_launch(dim3 grid, dim3 block) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64) throw Error("a block must have 1 to 1024 threads, z up to 64");
  const bool too_large = grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || too_large) {
    throw Error("a grid must have 1 to 2^31 - 1, 65535 and 65535 blocks");
  }
}

void adopt_main_fiber(unsigned threads) {
  if (main_fiber.stack == nullptr) {  // ASan wants to know where its stack lies
    pthread_attr_t attributes;
    void* stack;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &main_fiber.stack_size);
    pthread_attr_destroy(&attributes);
    main_fiber.stack = static_cast<char*>(stack);
  }
  if (__tsan_get_current_fiber) {
    main_fiber.tsan = __tsan_get_current_fiber();
    if (tsan_janitor == nullptr) tsan_janitor = __tsan_create_fiber(0);
    grow_idle(2 * threads);  // so that neighbouring blocks run under different TSan identities
  }
}

std::vector<uint64_t> block_order(uint64_t blocks) {
  std::vector<uint64_t> order(blocks);
  for (uint64_t i = 0; i < blocks; ++i) order[i] = i;
  for (uint64_t i = blocks; settings().seed && i > 1; --i) std::swap(order[i - 1], order[draw() % i]);
  return order;
}

}  // namespace

Settings& settings() {
  static Settings settings;
  return settings;
}

int lane() { return static_cast<int>(current->thread % 32); }

void may_yield() {
  if (settings().seed == 0 || draw() % 8 != 0) return;
  ready.push(current);
  jump(next_fiber());
}

void* static_shared(Where where, size_t bytes, size_t alignment) {
  Block* block = current->block;
  for (const Shared& shared : block->shared) {
    if (shared.where.line == where.line && shared.where.file == where.file) return shared.place;
  }
  if (alignment > kRedZone) fail("shared memory at " + text(where) + " asks for an alignment above 128");
  const size_t offset = (block->arena_used + 2 * kRedZone - 1) / kRedZone * kRedZone;
  if (block->shared.size() == 64 || offset + bytes > kSharedLimit) fail("static shared memory above 48 KiB");
  block->arena_used = offset + bytes;
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(block->arena + offset, bytes);
  block->shared.push_back({where, block->arena + offset});
  return block->arena + offset;
}

int block_barrier(Vote vote, int predicate, Where where) {
  Fiber* me = current;
  Block* block = me->block;
  if (block->alive < block->threads.size()) {
    fail("__syncthreads at " + text(where) + " after other threads of the block exited");
  }
  if (block->waiting == 0) block->first_waiting = me;
  const Where first = block->first_waiting->where;
  if (block->waiting > 0 && (first.line != where.line || std::strcmp(first.file, where.file) != 0)) {
    fail("divergent __syncthreads: here at " + text(where) + ", but thread " +
         std::to_string(block->first_waiting->thread) + " at " + text(first));
  }
  me->state = State::at_barrier;
  me->where = where;
  me->source = static_cast<int>(vote);
  block->votes += predicate != 0;
  if (++block->waiting == block->threads.size()) complete_barrier(block);
  jump(next_fiber());
  return static_cast<int>(me->value);
}

uint64_t warp_op(WarpOp op, unsigned mask, int source, uint64_t value, Where where) {
  Fiber* me = current;
  const Warp& warp = me->block->warps[me->thread / 32];
  const char* const call = kWarpOpName[static_cast<int>(op)];
  if (!(mask >> lane() & 1)) fail(std::string(call) + " at " + text(where) + ": the calling lane is not in the mask");
  if (mask & warp.exited) fail(std::string(call) + " at " + text(where) + ": the mask names a lane that exited");
  me->state = State::at_warp_op;
  me->op = op;
  me->mask = mask;
  me->source = source;
  me->value = value;
  me->where = where;
  try_complete_warp_op();
  jump(next_fiber());
  return me->value;
}

void run(dim3 grid, dim3 block, void (*kernel)(void*), void* arguments) {
  static std::mutex one_grid_at_a_time;
  const std::lock_guard<std::mutex> lock(one_grid_at_a_time);
  check_launch(grid, block);
  const unsigned threads = block.x * block.y * block.z;
  const size_t most_resident = static_cast<size_t>(std::max(1, settings().resident));
  adopt_main_fiber(threads);
  gridDim = grid;
  blockDim = block;
  running_kernel = kernel;
  running_arguments = arguments;
  error.clear();
  finished.clear();
  finished.reserve(most_resident);
  ready.reset(threads * most_resident);
  random_state = (settings().seed + 1) * 0x9e3779b97f4a7c15ull;
  const std::vector<uint64_t> order = block_order(uint64_t{grid.x} * grid.y * grid.z);

  std::vector<Block*> resident;
  for (size_t next = 0; error.empty();) {
    while (resident.size() < most_resident && next < order.size()) resident.push_back(start_block(order[next++]));
    if (resident.empty()) break;
    if (ready.empty()) error = deadlock(resident);
    if (error.empty()) jump(next_fiber());
    for (Block* done : finished) {
      resident.erase(std::find(resident.begin(), resident.end(), done));
      end_block(done);
    }
    finished.clear();
  }
  if (__tsan_acquire) __tsan_acquire(&tsan_end_token);
  for (Block* stopped : resident) end_block(stopped);
  if (!error.empty()) throw Error(error);
}

}  // namespace emulator
