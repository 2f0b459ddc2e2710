// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "smp/optimizer_core.h"

/// Optimizers by name. Internal.
namespace smp::c {

/// A `DistributedOptimizer` of whatever class.
class NamedOptimizer {
 public:
  virtual ~NamedOptimizer() = default;
  virtual void step() = 0;
  virtual void set_learning_rate(double rate) = 0;
  virtual const OptimizerCore& core() const = 0;

  /// The norm to which gradients are clipped before each step, if they are.
  std::optional<double> clip_grad_norm;
};

/// Makes the optimizer of that name, with options in text of JSON; empty for the defaults. Throws
/// `ConfigError` for an unknown name, and for options that it does not have or that have another
/// type.
std::unique_ptr<NamedOptimizer> make_optimizer(const std::string& name, const std::string& options,
                                               std::vector<at::Tensor> parameters);

}  // namespace smp::c
