// SPDX-License-Identifier: Apache-2.0
#include "graph/tensor_table.h"

#include <torch/csrc/autograd/variable.h>

#include "core/check.h"

namespace smp::graph {

void TensorTable::add(ValueKind kind, const std::string& name, const at::Tensor& tensor) {
  const auto known = by_impl_.find(tensor.unsafeGetTensorImpl());
  const size_t index = known == by_impl_.end() ? entries_.size() : known->second;
  const bool inserted = by_name_.emplace(name, index).second;
  SMP_CHECK_WITH(UsageError, inserted, "two tensors are registered as \"", name,
                 "\"; give each DistributedModel of the program a name of its own: "
                 "smp::DistributedModel model(net, smp::ModelOptions().name(\"...\"))");
  if (index < entries_.size()) {
    entries_[index].aliases.push_back(name);
    return;
  }
  by_impl_.emplace(tensor.unsafeGetTensorImpl(), index);
  if (tensor.has_storage()) by_storage_.emplace(tensor.storage().unsafeGetStorageImpl(), index);
  entries_.push_back({kind, name, tensor, {}});
  // A run of a step function finds it made, unless the tensor is trained later.
  if (tensor.requires_grad() && tensor.is_leaf()) {
    entries_.back().end = torch::autograd::impl::grad_accumulator(tensor);
  }
}

void TensorTable::renew_storage(const at::Tensor& tensor) {
  const size_t index = by_impl_.at(tensor.unsafeGetTensorImpl());
  if (find_storage(tensor) == nullptr) {
    by_storage_[tensor.storage().unsafeGetStorageImpl()] = index;
  }
}

const TensorTable::Entry* TensorTable::find(const at::Tensor& tensor) const {
  const auto it = by_impl_.find(tensor.unsafeGetTensorImpl());
  return it == by_impl_.end() ? nullptr : &entries_[it->second];
}

const TensorTable::Entry* TensorTable::find_storage(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return nullptr;
  const auto it = by_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (it == by_storage_.end()) return nullptr;
  // A registered tensor may have been given another storage, and its old one's address reused.
  const Entry& entry = entries_[it->second];
  const bool same =
      entry.tensor.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl();
  return same ? &entry : nullptr;
}

const TensorTable::Entry& TensorTable::at(const std::string& name) const {
  const auto it = by_name_.find(name);
  SMP_CHECK_WITH(UsageError, it != by_name_.end(), "no parameter or buffer is named \"", name,
                 "\"");
  return entries_[it->second];
}

}  // namespace smp::graph
