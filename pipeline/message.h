// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "graph/graph.h"

namespace smp::pipeline {

class CopyStream;

/// The tensors of one transfer as one message: a header that tells for each tensor whether it is
/// defined or a wrapped number, how it lies and its strides, then the elements of each in the order
/// of memory, as far from a multiple of 64 bytes as they were. Received tensors lie on the
/// message's own memory; nothing is copied out, but for those whose strides leave gaps or overlap.
///
/// The length follows from sizes and dtypes alone, so that a receive can be posted ahead. Strides
/// and the distance travel because kernels may round differently on another layout of the same
/// numbers.
class MessageLayout {
 public:
  explicit MessageLayout(const std::vector<graph::TensorMeta>& metas);

  /// Bytes of the message, a multiple of 64.
  int64_t nbytes() const { return nbytes_; }
  /// Those of the header, which the host reads and writes; a multiple of 64.
  int64_t header_bytes() const { return header_bytes_; }
  /// The device of the tensors, if some are not on the CPU: that of the first of these.
  at::Device device() const { return device_; }

  /// An empty message to receive into or to pack; one-dimensional, uint8, on the CPU.
  at::Tensor make_buffer() const;

  /// Copies `tensors` (sizes and dtypes as in the layout; undefined ones are allowed) into
  /// `message`, which is as `make_buffer` makes it. Expanded dimensions are sent once. If
  /// `device_part` is given, the elements go there, on the current stream, and `message` has the
  /// header only. Else they are in `message` when this returns, or, where it is copied there from
  /// a device, when the event is reached that it returns; the tensors must live until then.
  [[nodiscard]] std::optional<c10::Event> begin_pack(const std::vector<at::Tensor>& tensors,
                                                     const at::Tensor& message,
                                                     const at::Tensor& device_part = {}) const;

  /// Into a new message, and waits for it.
  at::Tensor pack(const std::vector<at::Tensor>& tensors) const;

  /// The tensors of a received message, on the devices of the layout, with the strides that they
  /// had; a view that shows less than an eighth of its memory becomes dense. Tensors without gaps
  /// that are on the device of their elements share the message's memory and keep it alive. Those
  /// on another device than the message may be used on the current stream.
  std::vector<at::Tensor> unpack(const at::Tensor& message,
                                 const at::Tensor& device_part = {}) const;

  /// Into `tensors`, which must be empty.
  void unpack(const at::Tensor& message, std::vector<at::Tensor>& tensors,
              const at::Tensor& device_part = {}) const;

 private:
  /// Where the elements of a message are: `data_at_` counts from `begin` bytes before the memory.
  struct Elements {
    const at::Tensor& memory;
    int64_t begin;
  };
  struct Slot;

  Elements elements_of(const at::Tensor& message, const at::Tensor& device_part) const;
  bool crosses(const Elements& elements) const;
  CopyStream& copy_stream() const;
  Slot slot_of(size_t index, const Elements& elements, int64_t shift) const;
  void copy_in(size_t index, const at::Tensor& tensor, const Elements& elements,
               int64_t* words) const;

  std::vector<graph::TensorMeta> metas_;
  std::vector<int64_t> header_at_;  // per tensor: index of its first int64 in the header
  std::vector<int64_t> data_at_;    // per tensor: byte offset of the room for its elements
  int64_t header_bytes_ = 0;
  int64_t nbytes_ = 0;
  at::Device device_ = at::kCPU;
  mutable std::shared_ptr<CopyStream> copy_stream_;  // made when the first tensor needs it
};

}  // namespace smp::pipeline
