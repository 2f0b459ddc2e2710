// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/storage.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/variable.h>

#include "core/node.h"
#include "graph/storage.h"

namespace smp::runtime {

bool has_data(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.storage().nbytes() > 0;
}

void hide_data(c10::StorageImpl& storage) {
  graph::take_data(storage, c10::DataPtr(nullptr, storage.device()),
                   "[smp] the data of a parameter was read or written in a step function, "
                   "which runs on tensors without data. Read it outside of the step");
}

void forget_grad_accumulator(const at::Tensor& tensor) {
  torch::autograd::impl::set_grad_accumulator(tensor, core::WeakNodePtr(core::NodePtr()));
}

void allocate_data(const at::Tensor& tensor) {
  if (has_data(tensor)) return;
  const at::Tensor fresh = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
  graph::give_data(*tensor.storage().unsafeGetStorageImpl(),
                   *fresh.storage().unsafeGetStorageImpl());
}

}  // namespace smp::runtime
