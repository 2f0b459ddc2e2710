// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <utility>

namespace smp::comm {

/// Where threads of this library meet objects that may be an interpreter's: they call back, and let
/// go of tensors, only inside the gate. The owner of such objects closes it before they end, since
/// from then on no other thread may touch them. One per process; open until it is closed.
class ExitGate {
 public:
  static ExitGate& get();

  /// Runs `call`, or returns false without it where the gate is closed.
  template <class Call>
  bool pass(Call&& call) {
    const Inside inside(*this);
    if (!inside.open) {
      return false;
    }
    std::forward<Call>(call)();
    return true;
  }

  /// Returns when no call is inside; none will be again. Not to be called from inside. A child of
  /// this process has none of its threads, and returns at once.
  void close();

  bool is_closed() const { return state_.load() >= kClosed; }

 private:
  static constexpr int64_t kClosed = int64_t{1} << 32;

  struct Inside {
    explicit Inside(ExitGate& g) : gate(g), open(gate.state_.fetch_add(1) < kClosed) {}
    ~Inside() { gate.state_.fetch_sub(1); }
    ExitGate& gate;
    const bool open;
  };

  std::atomic<int64_t> state_{0};  // calls inside, and kClosed
  const pid_t process_ = getpid();
};

/// Ends `value`, or keeps it for ever where the gate is closed.
template <class T>
void let_go(T value) {
  if (!ExitGate::get().pass([&value] { T ended = std::move(value); })) {
    new T(std::move(value));
  }
}

}  // namespace smp::comm
