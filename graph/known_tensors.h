// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "graph/graph.h"
#include "graph/weak_map.h"

namespace smp::graph {

/// Which value each tensor of a run's function is, by identity. Keeps no tensor alive.
class KnownTensors {
 public:
  struct Known {
    ValueId id = kUndefined;
    bool requires_grad = false;  ///< when an operator last returned it
    int64_t offset = 0;          ///< in its storage
  };

  void bind(const at::Tensor& tensor, ValueId id);
  /// Null for a tensor that is not known.
  const Known* find(const at::Tensor& tensor) const {
    return tensors_.find(tensor.unsafeGetTensorImpl());
  }
  /// The tensor that was bound last on the storage of this one.
  const Known* find_on_storage(const at::Tensor& tensor) const;
  /// One that shows the same elements, as a shallow copy does; may be undefined.
  at::Tensor find_shallow_copy(const at::Tensor& tensor) const;
  std::vector<std::pair<at::Tensor, ValueId>> alive() const;
  /// Values without data that something holds other than `outputs` and the step's result, which
  /// has each of them once.
  std::vector<ValueId> left_behind(const std::vector<at::Tensor>& outputs) const;

 private:
  WeakMap<c10::TensorImpl, Known> tensors_;
  WeakMap<c10::StorageImpl, Known> storages_;
};

}  // namespace smp::graph
