// SPDX-License-Identifier: Apache-2.0
#include "graph/operator_clock.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "graph/devices.h"

namespace smp::graph {
namespace {

constexpr int64_t kLeastFiller = int64_t{1} << 20, kMostFiller = int64_t{256} << 20;  // bytes
constexpr int kFillings = 32;  // for a measurement
/// Ahead of the device by so much, a host has time to give it an operator with its backward.
constexpr double kAhead = 500;  // us

double microseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

}  // namespace

OperatorClock::OperatorClock(at::Device device) : device_(device) {
  if (device.is_cpu()) return;
  double host = 1, device_us = 0;  // for as many fillings; the device must be the slower one
  for (int64_t bytes = kLeastFiller; device_us < 2 * host && bytes <= kMostFiller; bytes *= 2) {
    try {
      filler_ = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
    } catch (const c10::OutOfMemoryError&) {
      break;  // the model has it
    }
    for (int run = 0; run < 2; ++run) {  // the first may load a kernel
      fillings_ = 0;
      start();
      const auto begin = std::chrono::steady_clock::now();
      fillings_ = kFillings;
      keep_busy();
      host = microseconds_since(begin);
      device_us = stop();
    }
  }
  const double lead = std::max((device_us - host) / kFillings, 1.0);  // time of a filling
  fillings_ = filler_.defined() ? static_cast<int>(std::ceil(kAhead / lead)) : 0;
}

void OperatorClock::keep_busy() const {
  const at::NoGradGuard no_grad;
  for (int i = 0; i < fillings_; ++i) filler_.zero_();
}

void OperatorClock::start() {
  if (device_.is_cpu()) {
    started_ = std::chrono::steady_clock::now();
  } else {
    keep_busy();
    event_ = timed_event(device_);
  }
}

double OperatorClock::stop() {
  if (device_.is_cpu()) {
    return microseconds_since(started_);
  }
  constexpr double kUsPerMs = 1e3;
  const c10::Event end = timed_event(device_);
  end.synchronize();
  return kUsPerMs * event_->elapsedTime(end);
}

}  // namespace smp::graph
