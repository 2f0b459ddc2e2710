// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>

namespace smp::comm {

/// When a communication must be complete. It is set, or brought forward, while that is under way:
/// by a thread that begins to wait for it.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// Never, at first.
  Deadline() = default;
  explicit Deadline(std::chrono::milliseconds from_now) { set(from_now); }

  Clock::time_point get() const {
    return Clock::time_point(Clock::duration(at_.load(std::memory_order_relaxed)));
  }

  /// Sets it when a wait begins; a deadline that comes earlier stays.
  void set(std::chrono::milliseconds from_now) {
    const int64_t at = (Clock::now() + from_now).time_since_epoch().count();
    int64_t current = at_.load(std::memory_order_relaxed);
    while (at < current && !at_.compare_exchange_weak(current, at)) {
    }
  }

 private:
  std::atomic<int64_t> at_{std::numeric_limits<int64_t>::max()};
};

}  // namespace smp::comm
