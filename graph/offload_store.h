// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "graph/tensor_store.h"

namespace smp::graph {

/// Moves tensors out of the way until they are needed: from a device to the host's memory, and
/// those of the host to a file. One thread of its own copies, in the order of `put` and, before
/// that, of `prefetch`; it sleeps while there is nothing to do. A tensor needed before it was
/// copied never leaves.
///
/// The file has no name, so nothing stays behind when the process ends; it grows to the most bytes
/// that it held at a time.
class OffloadStore final : public TensorStore {
 public:
  /// `directory` is for the file, which is made at the first tensor of the host; empty: the one for
  /// temporary files.
  explicit OffloadStore(std::string directory = "");
  ~OffloadStore() override;

  /// Waits while more than `kMostWaiting` bytes wait to be copied. Throws `ConfigError` if the file
  /// cannot be made or written.
  std::shared_ptr<StoredTensor> put(const at::Tensor& tensor) override;

  /// Waits until all tensors that were put have left, but for those needed again.
  void wait();

  /// How many tensors were put so far, and the bytes copied away and back.
  int64_t puts() const;
  int64_t bytes_out() const;
  int64_t bytes_back() const;

  static constexpr int64_t kMostWaiting = int64_t{64} << 20;

 private:
  class Queue;
  class Item;

  std::shared_ptr<Queue> queue_;  // tensors may outlive the store
  std::thread thread_;
};

}  // namespace smp::graph
