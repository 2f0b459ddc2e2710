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

/// While it lives, this thread computes as libtorch's kernels expect it, whatever the caller has
/// set: floating-point exceptions do not trap and leave no flags, results are rounded to the
/// nearest number, and subnormal ones are kept.
class MaskedTraps {
 public:
  MaskedTraps() {
    std::feholdexcept(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~MaskedTraps() { std::fesetenv(&callers_); }
  MaskedTraps(const MaskedTraps&) = delete;
  MaskedTraps& operator=(const MaskedTraps&) = delete;

  const std::fenv_t& callers() const { return callers_; }

 private:
  std::fenv_t callers_{};
};

/// While it lives, the caller's traps and rounding are as before its call: for callbacks.
class CallersTraps {
 public:
  explicit CallersTraps(const MaskedTraps& masked) {
    std::fegetenv(&ours_);
    std::fesetenv(&masked.callers());
  }
  ~CallersTraps() { std::fesetenv(&ours_); }
  CallersTraps(const CallersTraps&) = delete;
  CallersTraps& operator=(const CallersTraps&) = delete;

 private:
  std::fenv_t ours_{};
};

/// Marks a handle as being in a call, unless another call is.
class Entry {
 public:
  explicit Entry(std::atomic<bool>& busy) : busy_(busy), entered_(!busy.exchange(true)) {}
  ~Entry() {
    if (entered_) busy_ = false;
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  bool entered() const { return entered_; }

 private:
  std::atomic<bool>& busy_;
  const bool entered_;
};

/// Runs the body of a call of the interface, given the traps that it has masked; its exceptions
/// become codes.
template <class Body>
smp_code run(Body&& body) noexcept {
  const MaskedTraps masked;
  try {
    body(masked);
    return SMP_OK;
  } catch (...) {
    return code_of_exception();
  }
}

}  // namespace smp::c
