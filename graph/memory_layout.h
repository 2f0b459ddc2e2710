// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace smp::graph {

/// Elements from the first to the last one of a tensor, with those that strides leave out; 0 for a
/// tensor without elements.
int64_t span_of(c10::IntArrayRef sizes, c10::IntArrayRef strides);

/// True if the strides may lead to one element in two ways.
bool overlaps_itself(c10::IntArrayRef sizes, c10::IntArrayRef strides);

/// Elements from a multiple of 64 bytes to the tensor's first; 0 for a tensor without elements.
int64_t shift_of(const at::Tensor& tensor);

/// How a tensor lies in memory, as far as kernels can tell: its sizes and strides, how far its
/// first element is from a multiple of 64 bytes, and whether it shows the memory's conjugate or
/// negative.
struct MemoryLayout {
  explicit MemoryLayout(const at::Tensor& tensor);
  MemoryLayout(c10::IntArrayRef sizes, c10::IntArrayRef strides, const at::TensorOptions& options,
               int64_t shift);

  /// New memory without content, and on it a tensor that lies like the one before.
  at::Tensor allocate() const;
  /// The memory of all elements in the span of such a tensor, as they follow each other.
  at::Tensor flat(const at::Tensor& tensor) const;
  /// Bytes of the span.
  int64_t nbytes() const;

  c10::SmallVector<int64_t, 5> sizes, strides;
  at::TensorOptions options;
  int64_t span = 0;
  int64_t shift = 0;  ///< `shift_of` the tensor
  bool conjugate = false, negative = false;
};

/// The tensor as far as it shows each element once: an expanded dimension has one.
at::Tensor without_expansion(const at::Tensor& tensor);

/// A copy without history that kernels cannot tell from the tensor, which has memory.
at::Tensor copy_as_laid_out(const at::Tensor& tensor);

}  // namespace smp::graph
