// SPDX-License-Identifier: Apache-2.0
#include "pipeline/device_clock.h"

#include <cmath>
#include <utility>

#include "graph/devices.h"
#include "pipeline/timeline.h"

namespace smp::pipeline {

int64_t DeviceClock::mark() {
  c10::Event event = graph::timed_event(device_);
  if (marks_.empty()) {
    event.synchronize();
    first_ = TimelineRecorder::now();
  }
  marks_.push_back(std::move(event));
  return static_cast<int64_t>(marks_.size()) - 1;
}

std::vector<int64_t> DeviceClock::times() const {
  constexpr double kNsPerMs = 1e6;
  std::vector<int64_t> times;
  if (!marks_.empty()) marks_.back().synchronize();
  for (const c10::Event& mark : marks_) {
    times.push_back(first_ + std::llround(kNsPerMs * marks_.front().elapsedTime(mark)));
  }
  return times;
}

}  // namespace smp::pipeline
