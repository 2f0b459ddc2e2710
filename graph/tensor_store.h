// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace smp::graph {

/// A tensor that was given to a `TensorStore`; its place there is free again when this goes.
class StoredTensor {
 public:
  virtual ~StoredTensor() = default;

  /// Begins to bring the tensor back, without waiting.
  virtual void prefetch() = 0;
  /// The tensor as it was, laid out alike (see `copy_as_laid_out`); waits for it. Throws the errors
  /// of storing or fetching it.
  virtual at::Tensor get() = 0;
};

/// Where tensors are kept that are not needed for a while. Belongs to one rank.
class TensorStore {
 public:
  virtual ~TensorStore() = default;

  /// Takes a tensor without history, which is not written any more.
  virtual std::shared_ptr<StoredTensor> put(const at::Tensor& tensor) = 0;
};

}  // namespace smp::graph
