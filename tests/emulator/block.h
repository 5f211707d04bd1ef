// A block of CUDA threads while it runs: its warps, its shared memory, and who waits for whom.
#pragma once
#include <string>
#include <vector>

#include "fiber.h"

namespace emulator {

struct Warp {
  unsigned existing = 0, exited = 0;
  char sync_tokens[32] = {};  // by the lowest lane of the mask: parts of a warp that sync apart stay apart
};

struct Shared {
  Where where;
  char* place;
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
  char start_token = 0, barrier_token = 0, end_token = 0;
};

std::string text(Where where);
std::string text(const Block& block);
std::string text(const Fiber& fiber);
std::string state_of(const Fiber& fiber);

// Make a block whose threads will run `entry`; none of them comes after anything that other blocks do.
Block* start_block(uint3 index, void (*entry)());
void exit_thread(Fiber* me);
void end_block(Block* block);

// In scheduler.cpp:
void wake(Fiber* fiber, uint64_t value);
// The fiber to run next: the main one where something has ended or gone wrong.
Fiber* next_fiber();
void set_error(const std::string& message);
[[noreturn]] void fail(const std::string& message);  // in the name of the current thread

}  // namespace emulator
