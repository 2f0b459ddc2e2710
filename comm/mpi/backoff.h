// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace smp::comm {

/// How a thread that polls gives its core away: a few yields, for answers that come at once, then
/// sleeps that grow from 20 to 200 microseconds. There may be more ranks than cores.
class Backoff {
 public:
  /// After progress.
  void reset() {
    yields_ = 0;
    sleep_ = kShortest;
  }

  /// After a poll without any.
  void pause() {
    if (yields_ < kYields) {
      ++yields_;
      sched_yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(sleep_ * 2, kLongest);
  }

 private:
  static constexpr int kYields = 50;
  static constexpr std::chrono::microseconds kShortest{20};
  static constexpr std::chrono::microseconds kLongest{200};

  int yields_ = 0;
  std::chrono::microseconds sleep_ = kShortest;
};

}  // namespace smp::comm
