// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <optional>

namespace smp::graph {

/// Measures the time that a device takes for its work. For the CPU that is the time of the host.
/// Others are given work by a host that may be slower than they are, and in a step it is ahead of
/// them: so they are kept busy until all is given to them, and the time between two events on their
/// own clock counts. Belongs to one thread.
class OperatorClock {
 public:
  explicit OperatorClock(at::Device device);

  /// Before it is given to this thread's current stream.
  void start();
  /// Microseconds since then. Waits until the device is there.
  double stop();

 private:
  /// Gives it work for longer than the host takes to give it an operator.
  void keep_busy() const;

  const at::Device device_;
  std::chrono::steady_clock::time_point started_;  // on the CPU
  std::optional<c10::Event> event_;                // elsewhere
  at::Tensor filler_;  // memory that is filled with zeros, over and over
  int fillings_ = 0;
};

}  // namespace smp::graph
