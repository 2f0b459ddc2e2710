// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>

#include "smp/model_core.h"
#include "smp/optimizer_core.h"
#include "tools/train/options.h"

namespace smp::tools::train {

/// A `DistributedOptimizer` of any class.
struct AnyOptimizer {
  std::shared_ptr<torch::optim::Optimizer> own;
  OptimizerCore* core = nullptr;  ///< the same object

  /// Sets it for all param groups.
  void set_lr(double lr) const {
    for (auto& group : own->param_groups()) group.options().set_lr(lr);
  }
};

/// For the parameters of a model that require gradients, those that have weight decay in a group of
/// their own.
AnyOptimizer make_optimizer(const OptimizerOptions& options, const ModelCore& model);

}  // namespace smp::tools::train
