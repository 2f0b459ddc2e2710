// SPDX-License-Identifier: Apache-2.0
#include "graph/parameter_residency.h"

#include <torch/csrc/autograd/variable.h>

#include "core/check.h"

namespace smp::graph {

size_t ResidentTensors::pack(const at::Tensor& tensor) {
  const auto counter = torch::autograd::impl::version_counter(tensor);
  saved_.push_back({tensor.tensor_data(), counter, counter.current_version()});
  return saved_.size() - 1;
}

at::Tensor ResidentTensors::unpack(size_t number) {
  Saved& saved = saved_[number];
  SMP_CHECK_WITH(UsageError, saved.counter.current_version() == saved.version, "a tensor of shape ",
                 saved.tensor.sizes(),
                 ", saved beside a sharded parameter by an operator whose backward reads it, has "
                 "been changed in place since. Replace the operator that changes it by one that "
                 "returns a new tensor");
  if (!saved.is_read) residency_->before_read(saved.tensor);
  saved.is_read = true;
  return saved.tensor;
}

void ResidentTensors::release(size_t number) noexcept {
  Saved& saved = saved_[number];
  if (saved.is_read) residency_->after_read(saved.tensor);
  saved.tensor.reset();
}

}  // namespace smp::graph
