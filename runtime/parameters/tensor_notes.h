// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include "graph/intercept.h"

namespace smp::runtime {

/// Notes of scopes about the tensors made inside, such as where they are pinned. A tensor is known
/// by its identity and by its storage: registering one may make another tensor on the same storage
/// (`torch::empty` does), and `module->to(dtype)` gives the same tensor another storage. Nothing is
/// kept alive. Internal; all threads may use it: a model is made on any of them, and a rank that is
/// a thread has tensors of its own.
template <class Note>
class TensorNotes {
 public:
  void set(const at::Tensor& tensor, const Note& note) {
    const std::lock_guard<std::mutex> lock(mutex_);
    drop_expired();
    tensors_.insert_or_assign(tensor.unsafeGetTensorImpl(),
                              Entry<c10::TensorImpl>{note, weak(tensor)});
    if (!tensor.has_storage()) return;
    storages_.insert_or_assign(
        tensor.storage().unsafeGetStorageImpl(),
        Entry<c10::StorageImpl>{note, c10::weak_intrusive_ptr<c10::StorageImpl>(
                                          tensor.storage().getWeakStorageImpl())});
  }

  std::optional<Note> find(const at::Tensor& tensor) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tensors_.find(tensor.unsafeGetTensorImpl());
    if (found != tensors_.end() && !found->second.object.expired()) return found->second.note;
    if (!tensor.has_storage()) return std::nullopt;
    const auto storage = storages_.find(tensor.storage().unsafeGetStorageImpl());
    const bool known = storage != storages_.end() && !storage->second.object.expired();
    return known ? std::optional<Note>(storage->second.note) : std::nullopt;
  }

 private:
  template <class T>
  struct Entry {
    Note note;
    c10::weak_intrusive_ptr<T> object;  // keeps the address from being used again
  };

  static c10::weak_intrusive_ptr<c10::TensorImpl> weak(const at::Tensor& tensor) {
    return c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr());
  }

  /// Temporaries are noted too; they go whenever the tables have doubled.
  void drop_expired() {
    if (tensors_.size() + storages_.size() < limit_) return;
    drop_expired(tensors_);
    drop_expired(storages_);
    limit_ = std::max(kLimit, 2 * (tensors_.size() + storages_.size()));
  }

  template <class Map>
  static void drop_expired(Map& map) {
    for (auto it = map.begin(); it != map.end();) {
      it = it->second.object.expired() ? map.erase(it) : std::next(it);
    }
  }

  static constexpr size_t kLimit = 1024;

  mutable std::mutex mutex_;
  size_t limit_ = kLimit;
  ska::flat_hash_map<const c10::TensorImpl*, Entry<c10::TensorImpl>> tensors_;
  ska::flat_hash_map<const c10::StorageImpl*, Entry<c10::StorageImpl>> storages_;
};

/// While it lives, calls `note` with the tensors that operators of this thread return.
class ResultNoter final : public graph::OperatorInterceptor {
 public:
  explicit ResultNoter(std::function<void(const at::Tensor&)> note)
      : note_(std::move(note)), intercept_(*this) {}

  void call(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    intercept_.call_outer(op, stack);
    const size_t returns = op.schema().returns().size();
    for (size_t i = stack.size() - returns; i < stack.size(); ++i) visit(stack[i]);
  }

 private:
  void visit(const c10::IValue& value) const {
    if (value.isTensor() && value.toTensor().defined()) {
      note_(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) note_(tensor);
    }
  }

  std::function<void(const at::Tensor&)> note_;
  graph::InterceptScope intercept_;
};

}  // namespace smp::runtime
