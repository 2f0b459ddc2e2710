// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "smp/optimizer_core.h"

/// Optimizers by name. Internal.
namespace smp::c {

/// A `DistributedOptimizer` of whatever class.
struct NamedOptimizer {
  std::shared_ptr<torch::optim::Optimizer> own;
  OptimizerCore* core = nullptr;  ///< the same object
  /// The norm to which gradients are clipped before each step, if they are.
  std::optional<double> clip_grad_norm;
};

/// Makes the optimizer of that name, with options in text of JSON; empty for the defaults. Throws
/// `ConfigError` for an unknown name, and for options that it does not have or that have another
/// type.
NamedOptimizer make_optimizer(const std::string& name, const std::string& options,
                              std::vector<at::Tensor> parameters);

}  // namespace smp::c
