// SPDX-License-Identifier: Apache-2.0
#include "pipeline/device_clock.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <utility>

#include "pipeline/timeline.h"

namespace smp::pipeline {

void DeviceClock::mark() {
  // The only kind of event that keeps a time.
  c10::Event event(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  if (marks_.empty()) {
    event.synchronize();
    first_ = TimelineRecorder::now();
  }
  marks_.push_back(std::move(event));
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
