// SPDX-License-Identifier: Apache-2.0
#include "graph/known_tensors.h"

#include <unordered_map>
#include <unordered_set>

#include "graph/shapes.h"

namespace smp::graph {
namespace {

/// The storages that are held by `outputs` and by the step's result, which has each of them once,
/// and by nothing else.
std::unordered_set<const c10::StorageImpl*> only_returned(const std::vector<at::Tensor>& outputs) {
  std::unordered_map<const c10::TensorImpl*, size_t> times;
  for (const at::Tensor& output : outputs) ++times[output.unsafeGetTensorImpl()];
  std::unordered_set<const c10::StorageImpl*> storages;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.has_storage()) continue;
    const c10::Storage& storage = output.storage();
    const bool one_tensor = storage.use_count() == 1;
    const bool one_holder = output.use_count() <= 2 * times.at(output.unsafeGetTensorImpl());
    if (one_tensor && one_holder) storages.insert(storage.unsafeGetStorageImpl());
  }
  return storages;
}

}  // namespace

void KnownTensors::bind(const at::Tensor& tensor, ValueId id) {
  const bool has_storage = tensor.has_storage();
  const Known known = {id, tensor.requires_grad(), has_storage ? tensor.storage_offset() : 0};
  if (known.requires_grad) number_placeholder(tensor, static_cast<uint32_t>(id));
  tensors_.add(tensor.unsafeGetTensorImpl(), [&] {
    return c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr());
  }) = known;
  if (!has_storage) return;
  const c10::Storage& storage = tensor.storage();
  storages_.add(storage.unsafeGetStorageImpl(), [&] { return storage.getWeakStorageImpl(); }) =
      known;
}

const KnownTensors::Known* KnownTensors::find_on_storage(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return nullptr;
  return storages_.find(tensor.storage().unsafeGetStorageImpl());
}

at::Tensor KnownTensors::find_shallow_copy(const at::Tensor& tensor) const {
  for (const auto& [other, id] : alive()) {
    if (other.has_storage() &&
        other.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl() &&
        other.sizes() == tensor.sizes() && other.strides() == tensor.strides() &&
        other.storage_offset() == tensor.storage_offset() &&
        other.scalar_type() == tensor.scalar_type()) {
      return other;
    }
  }
  return {};
}

std::vector<std::pair<at::Tensor, ValueId>> KnownTensors::alive() const {
  std::vector<std::pair<at::Tensor, ValueId>> tensors;
  tensors_.for_each_alive([&](const auto& owner, const Known& known) {
    tensors.emplace_back(owner, known.id);
    return true;
  });
  return tensors;
}

std::vector<ValueId> KnownTensors::left_behind(const std::vector<at::Tensor>& outputs) const {
  const auto returned = only_returned(outputs);
  std::vector<ValueId> left;
  storages_.for_each_alive([&](const auto& storage, const Known& known) {
    if (is_placeholder(*storage) && returned.count(storage.get()) == 0) left.push_back(known.id);
    return true;
  });
  return left;
}

}  // namespace smp::graph
