// One loop over independent items, on the OpenMP pool that torch uses too (same libgomp, so one set of threads).
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>

namespace fastrl::cpu {

// Below this many touched elements waking a second thread costs more than it saves.
constexpr int64_t kSerialElements = 100000;

inline int threads_for(int64_t elements, int num_threads) { return elements < kSerialElements ? 1 : num_threads; }

// body(i) for i in [0, n), a thread taking `at_once` of them at a time. Items must not share results, so the answer
// cannot depend on num_threads. An exception may not leave an OpenMP region: the first one is carried out of it.
template <class Body>
void parallel_for(int64_t n, int num_threads, const Body& body, int at_once = 4) {
  if (num_threads <= 1 || n <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  std::exception_ptr failure;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, at_once)
  for (int64_t i = 0; i < n; ++i) {
    try {
      body(i);
    } catch (...) {
      if (!failed.test_and_set()) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace fastrl::cpu
