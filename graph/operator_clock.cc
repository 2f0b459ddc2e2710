// SPDX-License-Identifier: Apache-2.0
#include "graph/operator_clock.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>

namespace smp::graph {
namespace {

constexpr int64_t kLeastFiller = int64_t{1} << 20, kMostFiller = int64_t{256} << 20;  // bytes
/// A host gives a device something in a few us: what takes longer puts it ahead.
constexpr double kSlowerThanHost = 20;  // us
/// Ahead of the device by so much, a host has time to give it an operator with its backward.
constexpr double kAhead = 500;  // us

}  // namespace

OperatorClock::OperatorClock(at::Device device) : device_(device) {
  if (device.is_cpu()) return;
  double filling = 0;
  for (int64_t bytes = kLeastFiller; filling < kSlowerThanHost && bytes <= kMostFiller;
       bytes *= 2) {
    filler_ = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
    for (int run = 0; run < 2; ++run) {  // the first may load a kernel
      start();
      filler_.zero_();
      filling = stop();
    }
  }
  fillings_ = static_cast<int>(std::ceil(kAhead / filling));
}

c10::Event OperatorClock::mark() const {
  // The only kind of event that keeps a time.
  c10::Event event(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return event;
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
    event_ = mark();
  }
}

double OperatorClock::stop() {
  if (device_.is_cpu()) {
    const auto taken = std::chrono::steady_clock::now() - started_;
    return std::chrono::duration<double, std::micro>(taken).count();
  }
  constexpr double kUsPerMs = 1e3;
  const c10::Event end = mark();
  end.synchronize();
  return kUsPerMs * event_->elapsedTime(end);
}

}  // namespace smp::graph
