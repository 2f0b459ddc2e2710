// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/master_weights.h"

#include <ATen/core/grad_mode.h>

namespace smp::runtime {

const at::Tensor& MasterWeights::make(const at::Tensor& tensor) {
  Entry& entry = entries_[tensor.unsafeGetTensorImpl()];
  if (!entry.master.defined()) {
    entry = {tensor, tensor.detach().to(at::kFloat).requires_grad_()};
  }
  return entry.master;
}

at::Tensor MasterWeights::find(const c10::TensorImpl* tensor) const {
  const auto found = entries_.find(tensor);
  return found == entries_.end() ? at::Tensor() : found->second.master;
}

void MasterWeights::set(const at::Tensor& tensor, const at::Tensor& values) {
  at::NoGradGuard no_grad;
  make(tensor).detach().copy_(values);
}

void MasterWeights::write_back(const at::Tensor& tensor, core::TensorUpdates& updates) const {
  at::NoGradGuard no_grad;
  updates.copy(tensor.detach(), find(tensor.unsafeGetTensorImpl()));
}

void MasterWeights::reload() {
  at::NoGradGuard no_grad;
  for (auto& [impl, entry] : entries_) entry.master.detach().copy_(entry.tensor);
}

}  // namespace smp::runtime
