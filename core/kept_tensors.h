// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <deque>
#include <vector>

namespace smp::core {

/// Tensors that are kept until a stream has done the work that uses them. For memory of one stream
/// that another one uses: to record the use (`recordDataPtrOnStream`) would not do, since
/// libtorch's allocator forgets uses that are recorded while any thread captures a graph on the
/// device. Belongs to one thread.
class KeptTensors {
 public:
  KeptTensors() = default;
  /// Waits for the streams, unless the device has failed.
  ~KeptTensors();
  KeptTensors(const KeptTensors&) = delete;
  KeptTensors& operator=(const KeptTensors&) = delete;

  /// Keeps them until `stream` has done all that it was given before this call. Lets go of those
  /// whose streams are done.
  void keep(std::vector<at::Tensor> tensors, const c10::Stream& stream);
  /// Lets go of those whose streams are done.
  void forget_done();

 private:
  struct Kept {
    c10::Event until;
    std::vector<at::Tensor> tensors;
  };

  std::deque<Kept> kept_;  // oldest first
};

}  // namespace smp::core
