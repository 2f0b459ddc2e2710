// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <vector>

#include "core/kept_tensors.h"

namespace smp::pipeline {

/// The stream on which the tensors of one channel are copied between a device and messages in host
/// memory, beside the current stream, which computes. The waits:
///
/// - A copy to the host waits for the current stream's earlier work; the thread that hands the
///   message over waits for the copy.
/// - A copy to the device waits for nothing: the message is there. The current stream's later work
///   waits for it. The host does not; the message is kept until the copy is done.
/// - The tensors that arrive are copied once more, by the current stream into memory of its own.
///   Memory of the copy stream is kept here until that copy is done (`core::KeptTensors`).
///
/// Knows devices by libtorch's own interface only. Belongs to one thread.
class CopyStream {
 public:
  /// Takes a stream from the device's pool.
  explicit CopyStream(at::Device device);
  /// Waits for copies under way.
  ~CopyStream();
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  /// Calls `copy`, which copies tensors that the current stream has made to the host, without
  /// waiting. Returns an event behind the copies, until which the tensors must live.
  c10::Event to_host(const std::function<void()>& copy);

  /// Calls `copy`, which copies from `message`, in host memory, into new tensors that it adds to
  /// `tensors`. Afterwards they are the current stream's.
  void to_device(const at::Tensor& message, std::vector<at::Tensor>& tensors,
                 const std::function<void()>& copy);

 private:
  c10::Stream current() const;

  c10::Stream stream_;
  core::KeptTensors messages_;  // that are being copied to the device
  core::KeptTensors arrived_;   // that the current stream copies into its own memory
};

}  // namespace smp::pipeline
