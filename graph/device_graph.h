// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "graph/random.h"

namespace smp::graph {

/// Work that a stream of a device was given while it was captured: a CUDA graph, or its counterpart
/// on another kind of device. Belongs to one thread at a time.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;

  /// From now on the pool's stream, which is this thread's current one, does nothing that it is
  /// given, but notes it. Memory that is allocated for it meanwhile is the pool's. `seeds`: how
  /// many its random operators may draw by.
  virtual void begin(size_t seeds) = 0;
  /// Ends that. Returns whether there is any work. Throws the device's error for work that cannot
  /// be captured.
  virtual bool end() = 0;
  /// Ends it after an error of one of these two, or between them; the graph is of no use then.
  virtual void abandon() noexcept = 0;

  /// Calls a random operator while work is noted. At a launch it draws from a generator that begins
  /// with the `seed`-th of its seeds, as it would draw if it were called then.
  virtual void call_random(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                           size_t seed) = 0;

  /// Gives the work to this thread's current stream. Its random operators draw by these seeds and
  /// nothing else: so many as it began with, or none where it has no random operators.
  virtual void launch(const std::vector<uint64_t>& seeds) = 0;
};

/// The memory and the stream that the graphs of a device share. The graphs are captured on the
/// stream, which has no other work. When the last graph of a pool is gone, no other can be
/// captured: libtorch's allocators never take the name of its memory again.
class DeviceGraphPool {
 public:
  virtual ~DeviceGraphPool() = default;
  virtual c10::Stream stream() const = 0;
  virtual std::unique_ptr<DeviceGraph> make_graph() = 0;
};

/// Makes a pool on a device of the kind that it is registered for.
using MakeDeviceGraphPool = std::function<std::shared_ptr<DeviceGraphPool>(at::Device device)>;

/// Says how devices of a kind capture work. Called by the implementation before any are used.
void register_device_graphs(c10::DeviceType type, MakeDeviceGraphPool make);

/// Whether the work of a device can be captured.
bool has_device_graphs(at::Device device);

/// Work that was captured, ready to be launched.
class CapturedWork {
 public:
  /// Launches as `DeviceGraph::launch` does. Random operators draw the numbers that they would draw
  /// under `key`. Gives the device nothing where nothing was captured, such as the first half of a
  /// divided backward on a stage that nothing is sent to.
  void launch(const RandomKey& key) const;

 private:
  friend class DeviceGraphCapture;
  std::shared_ptr<DeviceGraphPool> pool_;  // pool, kept as long as one of its graphs is there
  std::unique_ptr<DeviceGraph> graph_;
  bool is_empty_ = false;      // but for memory
  std::vector<int> ordinals_;  // ordinals by seed; none if it does not draw
};

/// Captures the work of one device, piece by piece, on a stream of its own. Nothing of it is done.
/// The pieces share their memory: a later capture may use memory that an earlier one has freed. So
/// they are to be launched in the order in which they were captured, again and again, some of them
/// perhaps not. Belongs to one thread; the autograd engine's may work for it.
class DeviceGraphCapture {
 public:
  /// Waits for the work of this thread's current stream. Throws `UsageError` for a device without
  /// graphs.
  explicit DeviceGraphCapture(at::Device device);
  /// Waits for the device's work that prepares the graphs.
  ~DeviceGraphCapture();
  DeviceGraphCapture(const DeviceGraphCapture&) = delete;
  DeviceGraphCapture& operator=(const DeviceGraphCapture&) = delete;

  /// Captures the work that `work` gives the device; it may call random operators of these
  /// `ordinals`, which ascend. Throws its errors, and the device's for work that cannot be
  /// captured.
  CapturedWork capture(const std::vector<int>& ordinals, const std::function<void()>& work);

 private:
  friend void call_keyed(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                         const RandomKey& key, int ordinal);

  /// For the next graph: another one if that of earlier graphs has none left.
  void renew_pool();
  void call_random(const c10::OperatorHandle& op, torch::jit::Stack& stack, int ordinal);

  const at::Device device_;
  std::shared_ptr<DeviceGraphPool> pool_;
  bool has_begun_ = false;  // a capture, with this pool
  // State of the capture that goes on.
  DeviceGraph* graph_ = nullptr;
  std::vector<int> ordinals_;
  bool draws_ = false;
};

/// Calls a random operator that is the `ordinal`-th of its program. Where its stream is captured it
/// draws at each launch, else now; always from the stream of `key` (see `RandomKey`).
void call_keyed(const c10::OperatorHandle& op, torch::jit::Stack& stack, const RandomKey& key,
                int ordinal);

}  // namespace smp::graph
