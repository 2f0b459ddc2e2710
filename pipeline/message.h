#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "graph/graph.h"

namespace smp::pipeline {

/// The tensors of one transfer as one message: a header that tells for each tensor whether it is
/// defined and its strides, then the elements of each in the order of memory, every tensor at a
/// multiple of 64 bytes. Received tensors lie on the message's own memory; nothing is copied
/// out, but for those whose strides leave gaps or overlap.
///
/// The length follows from sizes and dtypes alone, so that a receive can be posted ahead. Strides
/// travel because kernels may round differently on another layout of the same numbers.
class MessageLayout {
 public:
  explicit MessageLayout(const std::vector<graph::TensorMeta>& metas);

  /// Bytes of the message, a multiple of 64.
  int64_t nbytes() const { return nbytes_; }

  /// An empty message to receive into or to pack; one-dimensional, uint8, on the CPU.
  at::Tensor make_buffer() const;

  /// Copies `tensors` (sizes and dtypes as in the layout; undefined ones are allowed) into
  /// `message`, which is as `make_buffer` makes it. Expanded dimensions are sent once.
  void pack(const std::vector<at::Tensor>& tensors, const at::Tensor& message) const;

  /// Into a new message.
  at::Tensor pack(const std::vector<at::Tensor>& tensors) const;

  /// The tensors of a received message, on the devices of the layout, with the strides that they
  /// had; a view that shows less than an eighth of its memory becomes dense. CPU tensors without
  /// gaps share the message's memory and keep it alive.
  std::vector<at::Tensor> unpack(const at::Tensor& message) const;

  /// Into `tensors`, which must be empty.
  void unpack(const at::Tensor& message, std::vector<at::Tensor>& tensors) const;

 private:
  void copy_in(size_t index, const at::Tensor& tensor, const at::Tensor& message,
               int64_t* words) const;
  at::Tensor view_of(const at::Tensor& message, size_t index, at::IntArrayRef sizes,
                     at::IntArrayRef strides) const;
  at::Tensor with_strides(const at::Tensor& message, size_t index, at::IntArrayRef strides) const;

  std::vector<graph::TensorMeta> metas_;
  std::vector<int64_t> header_at_;  // per tensor: index of its first int64 in the header
  std::vector<int64_t> data_at_;    // per tensor: byte offset of its elements
  int64_t nbytes_ = 0;
};

}  // namespace smp::pipeline
