// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cfenv>
#include <exception>
#include <string>

#include "smp/c.h"

/// The boundary to C: no exception crosses it. Internal.
namespace smp::c {

/// Stores the text of smp_last_error, and returns `code`.
smp_code set_error(smp_code code, std::string text) noexcept;
const char* last_error() noexcept;

/// The code of the exception that is being handled, of which `set_error` keeps the text.
smp_code code_of_exception() noexcept;

/// The error of a second thread that uses a handle.
class Busy : public std::exception {
 public:
  const char* what() const noexcept override;
};

/// While it lives, kernels of this thread use as many threads as those of all calls, and OpenMP's
/// number, which is one for each thread, is not the caller's.
class KernelThreads {
 public:
  KernelThreads();
  ~KernelThreads();
  KernelThreads(const KernelThreads&) = delete;
  KernelThreads& operator=(const KernelThreads&) = delete;

  /// Sets the number for all calls from now on; without it that is libtorch's at the first call.
  static void choose(int number);

  int callers() const { return callers_; }

 private:
  const int callers_;
};

/// While it lives, this thread computes as libtorch's kernels expect it, whatever the caller has
/// set: floating-point exceptions do not trap and leave no flags, results are rounded to the
/// nearest number, and subnormal ones are kept; and threads are as `KernelThreads` has them.
class MaskedTraps {
 public:
  MaskedTraps() = default;
  ~MaskedTraps() { std::fesetenv(&callers_); }
  MaskedTraps(const MaskedTraps&) = delete;
  MaskedTraps& operator=(const MaskedTraps&) = delete;

  const std::fenv_t& callers() const { return callers_; }
  const KernelThreads& threads() const { return threads_; }

 private:
  static std::fenv_t mask() {
    std::fenv_t callers{};
    std::feholdexcept(&callers);
    std::fesetenv(FE_DFL_ENV);
    return callers;
  }

  const std::fenv_t callers_ = mask();
  const KernelThreads threads_;  // threads that it starts have the traps of this one
};

/// While it lives, this thread is in a callback: the caller's traps, rounding and threads are as
/// before its call, and other calls are refused.
class Callback {
 public:
  explicit Callback(const MaskedTraps& masked);
  ~Callback();
  Callback(const Callback&) = delete;
  Callback& operator=(const Callback&) = delete;

 private:
  std::fenv_t ours_{};
  const int our_threads_;
};

/// Throws `UsageError` in a callback.
void check_no_callback();

/// Marks a handle as being in a call, unless another call is.
class Entry {
 public:
  explicit Entry(std::atomic<bool>& busy) : busy_(busy), entered_(!busy.exchange(true)) {}
  ~Entry() {
    if (entered_) busy_ = false;
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  /// Throws `Busy` where another call is, and as `check_no_callback` does.
  void check() const;

 private:
  std::atomic<bool>& busy_;
  const bool entered_;
};

/// Runs the body of a call of the interface, given the traps that it has masked; its exceptions
/// become codes.
template <class Body>
smp_code run(Body&& body) noexcept {
  try {
    check_no_callback();
    const MaskedTraps masked;
    body(masked);
    return SMP_OK;
  } catch (...) {
    return code_of_exception();
  }
}

}  // namespace smp::c
