// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <vector>

namespace smp::pipeline {

/// When a device comes to points of its work, which the host only gives it. Belongs to one thread
/// and one step.
class DeviceClock {
 public:
  /// `device` is not the CPU.
  explicit DeviceClock(c10::Device device) : device_(device) {}

  /// Notes the point behind all that this thread's current stream of the device was given. The
  /// first time it waits until the device is there. Returns the point's number, from 0.
  int64_t mark();

  /// When the device came to each point, in ns, on the clock of `TimelineRecorder::now`. Waits
  /// until it has come to the last.
  std::vector<int64_t> times() const;

 private:
  const c10::Device device_;
  std::vector<c10::Event> marks_;
  int64_t first_ = 0;  // on the host's clock
};

}  // namespace smp::pipeline
