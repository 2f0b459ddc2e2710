// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>

namespace smp::runtime {

/// The number of calls of `smp::keep_copy` of which one keeps a copy if copies may take 3 % of the
/// time: a copy takes `copy_seconds`, and from one call to the next it is `call_seconds` without
/// it. That counts for 2 %, since a step whose caches it has emptied is slower, too. No more than
/// twice as many as before, since one measurement may be of an odd moment.
inline int64_t next_interval(int64_t interval, double copy_seconds, double call_seconds) {
  constexpr double kShare = 0.02;
  const double calls = std::ceil(copy_seconds / (kShare * std::max(call_seconds, 1e-9)));
  return static_cast<int64_t>(std::clamp(calls, 1.0, 2.0 * static_cast<double>(interval)));
}

/// When copies are kept, and the time of the last one. Belongs to one rank.
struct CopyPace {
  using Clock = std::chrono::steady_clock;
  /// Seconds that it takes on another thread, to be read when that has ended.
  using Seconds = std::shared_ptr<std::atomic<double>>;

  int64_t calls_to_next = 0;         ///< that keep none
  int64_t interval = 1;              ///< calls from the last copy to the next
  Clock::time_point last_call;       ///< The end of the one that kept the last copy.
  Seconds last_took;                 ///< Null: there is none.
  bool has_told_of_failure = false;  ///< a failure since the last copy kept was told
};

}  // namespace smp::runtime
