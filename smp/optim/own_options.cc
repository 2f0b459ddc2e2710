// SPDX-License-Identifier: Apache-2.0
#include "smp/optim/own_options.h"

#include <utility>

namespace smp::optim {

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
