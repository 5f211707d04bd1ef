// A CUDA thread as a fiber: its own stack, and an identity of its own for the sanitizers. What is below the meaning of
// barriers and warps; that is in scheduler.cpp.
#pragma once
#include <cstddef>
#include <cstdint>

#include "scheduler.h"

namespace emulator {

enum class State { ready, at_barrier, at_warp_op, done };

struct Block;

struct Fiber {
  char* stack = nullptr;
  size_t stack_size = 0;
  void *stack_pointer = nullptr, *asan_stack = nullptr, *tsan = nullptr;
  // The thread that runs on it.
  Block* block = nullptr;
  unsigned thread = 0;  // in its block
  uint3 thread_index{}, block_index{};
  State state = State::ready;
  Where where{"", 0};  // it waits
  Vote vote = Vote::none;
  WarpOp op = WarpOp::sync;
  unsigned mask = 0;
  int source = 0;
  uint64_t value = 0;  // given to, then returned by a warp operation or vote
};

Fiber* current_fiber();
Fiber* main_fiber();  // the operating-system thread that runs the grid

// Make the main fiber known, and enough idle fibers that blocks of `threads` which follow each other run under
// different TSan identities.
void prepare_fibers(unsigned threads);
// A fiber that will call `entry` when it is first jumped to.
Fiber* take_fiber(void (*entry)());
void give_back_fiber(Fiber* fiber);
// First thing in `entry`.
void enter_fiber();
// Run `to` until something jumps back. `for_ever`: nothing will.
void jump(Fiber* to, bool for_ever = false);

namespace asan {
void forbid(void* from, size_t bytes);
void allow(void* from, size_t bytes);
}  // namespace asan

// ThreadSanitizer's happens-before edges: who acquires a token comes after all who have released it. Nothing else
// orders the memory of two fibers: they run on one operating-system thread, but a switch counts for nothing.
namespace tsan {
void release(void* token);
void acquire(void* token);
void release_as(const Fiber* fiber, void* token);
void acquire_as(const Fiber* fiber, void* token);
// Free memory after all who have released the token, without the caller coming after them.
void free_after(void* token, void* memory);
}  // namespace tsan

}  // namespace emulator
