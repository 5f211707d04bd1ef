// Never compiled with -fsanitize: the same object serves plain, ASan and TSan libraries and finds the sanitizers' hooks
// as weak symbols.
#include "fiber.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>

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
constexpr unsigned kOrdersNoMemory = 1;  // flag of __tsan_switch_to_fiber

Fiber the_main_fiber, *current = &the_main_fiber;
std::deque<Fiber*> idle;  // each with a stack and a TSan identity for good; the longest idle is used next
void* tsan_janitor;       // a fiber that only frees memory

void grow_idle(size_t wanted) {
  while (idle.size() < wanted) {  // 64 stacks at once, each with a guard page below it
    constexpr size_t each = kStack + kGuard;
    void* pages = mmap(nullptr, 64 * each, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) {
      std::perror("emulator: no memory for stacks");
      std::abort();
    }
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

void find_main_stack() {  // ASan wants to know where it lies
  pthread_attr_t attributes;
  void* stack;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &stack, &the_main_fiber.stack_size);
  pthread_attr_destroy(&attributes);
  the_main_fiber.stack = static_cast<char*>(stack);
}

}  // namespace

Fiber* current_fiber() { return current; }
Fiber* main_fiber() { return &the_main_fiber; }

void prepare_fibers(unsigned threads) {
  if (the_main_fiber.stack == nullptr) find_main_stack();
  if (__tsan_get_current_fiber == nullptr) return;
  the_main_fiber.tsan = __tsan_get_current_fiber();
  if (tsan_janitor == nullptr) tsan_janitor = __tsan_create_fiber(0);
  grow_idle(2 * threads);
}

Fiber* take_fiber(void (*entry)()) {
  if (idle.empty()) grow_idle(1);
  Fiber* fiber = idle.front();
  idle.pop_front();
  asan::allow(fiber->stack, kStack);
  // What emulator_switch_stack finds: six registers, then where to return to, on a stack aligned as after a call.
  void** top = reinterpret_cast<void**>(fiber->stack + kStack) - 2;
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(entry);
  std::fill(top - 8, top - 2, nullptr);
  fiber->stack_pointer = top - 8;
  fiber->asan_stack = nullptr;
  fiber->state = State::ready;
  return fiber;
}

void give_back_fiber(Fiber* fiber) { idle.push_back(fiber); }

void enter_fiber() {
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
}

void jump(Fiber* to, bool for_ever) {
  Fiber* from = current;
  if (to == from) return;
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &from->asan_stack, to->stack, to->stack_size);
  }
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to->tsan, kOrdersNoMemory);
  current = to;
  threadIdx = to->thread_index;
  blockIdx = to->block_index;
  emulator_switch_stack(&from->stack_pointer, to->stack_pointer);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(from->asan_stack, nullptr, nullptr);
}

namespace asan {
void forbid(void* from, size_t bytes) {
  if (__asan_poison_memory_region) __asan_poison_memory_region(from, bytes);
}
void allow(void* from, size_t bytes) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(from, bytes);
}
}  // namespace asan

namespace tsan {
void release(void* token) {
  if (__tsan_release) __tsan_release(token);
}
void acquire(void* token) {
  if (__tsan_acquire) __tsan_acquire(token);
}
void release_as(const Fiber* fiber, void* token) {
  if (__tsan_release == nullptr) return;
  __tsan_switch_to_fiber(fiber->tsan, kOrdersNoMemory);
  __tsan_release(token);
  __tsan_switch_to_fiber(current->tsan, kOrdersNoMemory);
}
void acquire_as(const Fiber* fiber, void* token) {
  if (__tsan_acquire == nullptr) return;
  __tsan_switch_to_fiber(fiber->tsan, kOrdersNoMemory);
  __tsan_acquire(token);
  __tsan_switch_to_fiber(current->tsan, kOrdersNoMemory);
}
void free_after(void* token, void* memory) {
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(tsan_janitor, kOrdersNoMemory);
  acquire(token);
  std::free(memory);
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(current->tsan, kOrdersNoMemory);
}
}  // namespace tsan

}  // namespace emulator
