// Never compiled with -fsanitize: see fiber.cpp and block.cpp.
#include "scheduler.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "block.h"

namespace emulator {
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

void thread_main() {
  enter_fiber();
  running_kernel(running_arguments);
  exit_thread(current_fiber());
  tsan::release(&grid_end_token);
  if (current_fiber()->block->alive == 0) finished.push_back(current_fiber()->block);
  jump(next_fiber(), true);
  std::abort();
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

uint3 block_index(uint64_t id) {
  return {static_cast<unsigned>(id % gridDim.x), static_cast<unsigned>(id / gridDim.x % gridDim.y),
          static_cast<unsigned>(id / gridDim.x / gridDim.y)};
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
    while (resident.size() < settings.resident && next < order.size()) {
      resident.push_back(start_block(block_index(order[next++]), thread_main));
    }
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

void configure(const Settings& chosen) { settings = chosen; }

void may_yield() {
  if (settings.seed == 0 || draw() % 8 != 0) return;
  ready.push(current_fiber());
  jump(next_fiber());
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
