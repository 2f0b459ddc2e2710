// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

/// A lower bound of an all-reduce of float32: two threads of one process, on buffers that both see,
/// each of which adds its half of all buffers and writes the sum to all of them. Nothing is
/// synchronised but a flag for each.
class Floor {
 public:
  Floor(int buffers, int64_t elements);

  /// Starts and ends the second thread, which keeps its core busy in between.
  void begin();
  void end();

  void run();

 private:
  void add_half(int half);
  void loop();

  std::vector<at::Tensor> tensors_;
  std::vector<float*> buffers_;
  int64_t elements_;
  alignas(64) std::atomic<int64_t> asked_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  std::thread thread_;
};
