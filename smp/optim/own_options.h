// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "smp/export.h"

namespace smp::optim {

/// Base of optimizers whose options are of a class of their own. From libtorch 2.14 on, its
/// optimizers give a param group the optimizer's defaults in place of options of a class that
/// libtorch does not know; those of this one keep their own.
class SMP_API OwnOptions : public torch::optim::Optimizer {
 public:
  OwnOptions(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
             std::unique_ptr<torch::optim::OptimizerOptions> defaults);

  /// Hides libtorch's function, which a call by way of `torch::optim::Optimizer&` reaches.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);
};

}  // namespace smp::optim
