// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/placement.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Allocator.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <map>
#include <utility>

#include "graph/recording.h"
#include "graph/storage.h"
#include "runtime/parameters/delayed.h"
#include "runtime/parameters/scope_notes.h"
#include "runtime/parameters/storage.h"

namespace smp::runtime {
namespace {

/// The device's storage for each of the host's.
using Storages = std::map<const c10::StorageImpl*, c10::Storage>;

c10::Storage without_data(at::Device device) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
                       c10::GetAllocator(device.type()), /*resizable=*/true);
  hide_data(*storage.unsafeGetStorageImpl());
  return storage;
}

/// Sets the storage like `set_data`, which refuses devices that libtorch does not know by name.
void set_storage(const at::Tensor& tensor, const c10::Storage& storage) {
  const auto key = c10::computeDispatchKey(tensor.scalar_type(), tensor.layout(), storage.device());
  const at::Tensor shown = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), tensor.dtype());
  shown.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                     tensor.storage_offset());
  shown._set_conj(tensor.is_conj());
  shown._set_neg(tensor.is_neg());
  tensor.unsafeGetTensorImpl()->shallow_copy_from(shown.getIntrusivePtr());
  forget_grad_accumulator(tensor);
}

/// Keeps notes of scopes that are known by the storage that the tensor is about to lose.
template <class Note>
void keep_note(TensorNotes<Note>& notes, const at::Tensor& tensor) {
  if (const auto note = notes.find(tensor)) notes.set(tensor, *note);
}

void show(Runtime& runtime, const ParameterTable::Entry& entry, Storages& storages) {
  const at::Tensor& tensor = entry.tensor;
  keep_note(partition_pins(), tensor);
  keep_note(tensor_parallelism_marks(), tensor);
  const auto known = storages.find(tensor.storage().unsafeGetStorageImpl());
  const c10::Storage storage =
      known != storages.end() ? known->second : without_data(runtime.device());
  storages.emplace(tensor.storage().unsafeGetStorageImpl(), storage);
  at::Tensor values = tensor.variable_data();
  set_storage(tensor, storage);
  runtime.table().set_waiting(entry.name, std::move(values));
}

/// All bytes of a storage.
at::Tensor bytes_of(const c10::Storage& storage) {
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  return graph::tensor_on(storage, {{bytes}, {1}, at::kByte}, 0);
}

}  // namespace

void show_on_device(Runtime& runtime) {
  Storages storages;
  for (const auto& entry : runtime.table().entries()) {
    if (entry.tensor.device() != runtime.device()) show(runtime, entry, storages);
  }
  for (const auto& entry : runtime.table().entries()) {
    if (entry.is_parameter()) continue;
    make_values(entry);
    move_in(runtime, entry);
  }
}

bool has_waiting(const ParameterTable& table) {
  const auto& entries = table.entries();
  return std::any_of(entries.begin(), entries.end(),
                     [](const auto& entry) { return entry.waiting.defined(); });
}

void move_in(Runtime& runtime, const ParameterTable::Entry& entry) {
  if (!entry.waiting.defined()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor& tensor = entry.tensor;
  if (!has_data(tensor)) {
    const at::Tensor moved = bytes_of(entry.waiting.storage()).to(tensor.device());
    graph::give_data(*tensor.storage().unsafeGetStorageImpl(),
                     *moved.storage().unsafeGetStorageImpl());
  }
  if (tensor.grad().defined()) tensor.mutable_grad() = tensor.grad().to(tensor.device());
  runtime.table().set_waiting(entry.name, {});
}

}  // namespace smp::runtime
