// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

#include "smp/export.h"

namespace smp::optim {

/// Gives the L2 norm over the gradients of parameters, of which some may have none.
using GradNorm = std::function<at::Tensor(const std::vector<at::Tensor>& parameters)>;

/// Base of optimizers that need the norm over all gradients: where a model is divided among ranks,
/// `DistributedOptimizer` has them use one over all.
class SMP_API UsesGradNorm {
 public:
  virtual ~UsesGradNorm() = default;
  void set_grad_norm(GradNorm norm) { grad_norm_ = std::move(norm); }

 protected:
  /// Takes the norm over the parameters of this process alone.
  UsesGradNorm();

  GradNorm grad_norm_;
};

}  // namespace smp::optim
