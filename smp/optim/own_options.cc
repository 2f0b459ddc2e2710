// SPDX-License-Identifier: Apache-2.0
#include "smp/optim/own_options.h"

#include <algorithm>
#include <utility>

#include "optim/step_parts.h"

namespace smp::optim {

void detail::write_field(torch::serialize::OutputArchive& archive, const char* name,
                         const c10::IValue& value) {
  if (!value.isTensor() || value.toTensor().defined()) archive.write(name, value);
}

c10::IValue detail::read_field(torch::serialize::InputArchive& archive, const char* name,
                               bool is_tensor) {
  c10::IValue value;
  const bool exists = archive.try_read(name, value);
  TORCH_INTERNAL_ASSERT(exists || is_tensor, "an archive without the field ", name);
  return value;
}

bool detail::same_fields(const std::vector<c10::IValue>& lhs, const std::vector<c10::IValue>& rhs) {
  return std::equal(lhs.begin(), lhs.end(), rhs.begin(), [](const auto& a, const auto& b) {
    return a.isTensor() ? same_tensor(a.toTensor(), b.toTensor()) : a == b;
  });
}

using torch::optim::OptimizerParamGroup;

OwnOptions::OwnOptions(const std::vector<OptimizerParamGroup>& param_groups,
                       std::unique_ptr<torch::optim::OptimizerOptions> defaults)
    : Optimizer(std::vector<OptimizerParamGroup>(), std::move(defaults)) {
  for (const OptimizerParamGroup& group : param_groups) add_param_group(group);
}

void OwnOptions::add_param_group(const OptimizerParamGroup& param_group) {
  Optimizer::add_param_group(param_group);
  if (param_group.has_options()) {
    param_groups_.back().set_options(param_group.options().clone());
  }
}

}  // namespace smp::optim
