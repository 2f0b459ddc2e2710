// SPDX-License-Identifier: Apache-2.0
#include "smp/c/call.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <new>
#include <utility>

#include "core/check.h"
#include "core/failure.h"
#include "smp/error.h"

// OpenMP's, where libtorch is built with it.
extern "C" {
int omp_get_max_threads() __attribute__((weak));
void omp_set_num_threads(int number) __attribute__((weak));
}

namespace smp::c {
namespace {

std::string& error_text() {
  thread_local std::string text;
  return text;
}

bool& is_in_callback() {
  thread_local bool is = false;
  return is;
}

/// OpenMP's number for this thread; 0 without OpenMP.
int openmp_threads() { return omp_get_max_threads == nullptr ? 0 : omp_get_max_threads(); }

void set_openmp_threads(int number) {
  if (omp_set_num_threads != nullptr) omp_set_num_threads(number);
}

/// How many threads the kernels of all calls use.
std::atomic<int>& kernel_threads() {
  static std::atomic<int> number{at::get_num_threads()};
  return number;
}

template <class E>
bool is(const std::exception& error) {
  return dynamic_cast<const E*>(&error) != nullptr;
}

smp_code code_of(const std::exception& error) {
  if (is<Busy>(error)) return SMP_ERROR_BUSY;
  if (is<ConfigError>(error)) return SMP_ERROR_CONFIG;
  if (is<UsageError>(error)) return SMP_ERROR_USAGE;
  if (is<CaptureError>(error)) return SMP_ERROR_CAPTURE;
  if (is<PartitionError>(error)) return SMP_ERROR_PARTITION;
  if (is<TimeoutError>(error)) return SMP_ERROR_TIMEOUT;
  if (is<CommError>(error)) return SMP_ERROR_COMM;
  if (is<CheckpointError>(error)) return SMP_ERROR_CHECKPOINT;
  if (is<CorruptionError>(error)) return SMP_ERROR_CORRUPTION;
  if (is<std::bad_alloc>(error) || is<c10::OutOfMemoryError>(error)) return SMP_ERROR_MEMORY;
  return SMP_ERROR_OTHER;
}

}  // namespace

smp_code set_error(smp_code code, std::string text) noexcept {
  error_text() = std::move(text);
  return code;
}

const char* last_error() noexcept { return error_text().c_str(); }

smp_code code_of_exception() noexcept {
  try {
    try {
      throw;
    } catch (const std::exception& error) {
      return set_error(code_of(error), core::message_of(error));
    } catch (...) {
      return set_error(SMP_ERROR_OTHER, "an exception that is no std::exception");
    }
  } catch (...) {  // there is no memory for the text
    error_text().clear();
    return SMP_ERROR_MEMORY;
  }
}

const char* Busy::what() const noexcept {
  return "another thread is in a call with this handle. One thread at a time uses it: guard the "
         "calls by a lock of your own, or make them all on one thread";
}

Callback::Callback(const MaskedTraps& masked) : our_threads_(openmp_threads()) {
  is_in_callback() = true;
  set_openmp_threads(masked.threads().callers());
  std::fegetenv(&ours_);
  std::fesetenv(&masked.callers());
}

Callback::~Callback() {
  std::fesetenv(&ours_);
  set_openmp_threads(our_threads_);
  is_in_callback() = false;
}

void check_no_callback() {
  SMP_CHECK_WITH(UsageError, !is_in_callback(),
                 "a function of smp/c.h was called by the function that gives gradients. Return "
                 "from that first");
}

void Entry::check() const {
  check_no_callback();
  if (!entered_) throw Busy();
}

KernelThreads::KernelThreads() : callers_(openmp_threads()) {
  at::internal::lazy_init_num_threads();  // else a kernel does so, and chooses another number
  // MKL has a number for each thread, too, which OpenMP's does not change.
  thread_local int number_of_mkl = at::get_num_threads();
  const int number = kernel_threads();
  if (std::exchange(number_of_mkl, number) != number) at::set_num_threads(number);
  set_openmp_threads(number);
}

KernelThreads::~KernelThreads() { set_openmp_threads(callers_); }

void KernelThreads::choose(int number) {
  kernel_threads() = number;
  at::set_num_threads(number);  // for threads that libtorch starts
}

}  // namespace smp::c
