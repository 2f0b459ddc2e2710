// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <mutex>

#include "graph/weak_map.h"

namespace smp::graph {

/// The memory of tensors that are the same for all microbatches though they are no arguments of the
/// step function: the program has said so, or a step function has made them from constants. Keeps
/// none of it alive. Any thread may call it.
class WholeTensors {
 public:
  void add(const c10::Storage& storage) {
    const std::lock_guard<std::mutex> lock(mutex_);
    storages_.add(storage.unsafeGetStorageImpl(), [&] { return storage.getWeakStorageImpl(); });
  }
  bool holds(const at::Tensor& tensor) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return tensor.has_storage() &&
           storages_.find(tensor.storage().unsafeGetStorageImpl()) != nullptr;
  }

 private:
  struct Nothing {};
  mutable std::mutex mutex_;
  WeakMap<c10::StorageImpl, Nothing> storages_;
};

}  // namespace smp::graph
