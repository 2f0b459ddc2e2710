// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

#include "smp/export.h"

namespace smp::optim {

/// A tensor that lies as a parameter does: the parameter itself, its gradient, or its update.
struct SMP_API TensorOfParameter {
  at::Tensor parameter;
  at::Tensor tensor;
};

/// Gives the norm of each tensor, of order 2 or infinity. The list has one for every parameter of
/// the optimizer's groups that has a gradient.
using TensorNorms = std::function<std::vector<double>(const std::vector<TensorOfParameter>& tensors,
                                                      double norm_type)>;

/// Base of optimizers that need norms of parameters, gradients or updates, and treat elements apart
/// otherwise: where ranks have parts or pieces of parameters, `DistributedOptimizer` has them use
/// norms of the whole, with the bits of one process. That is collective over the ranks that have
/// parameters together, so that a step asks equally often on all of them, also where a rank has no
/// parameter to ask for.
class SMP_API UsesTensorNorms {
 public:
  virtual ~UsesTensorNorms() = default;
  void set_tensor_norms(TensorNorms norms) { tensor_norms_ = std::move(norms); }

 protected:
  /// Takes norms of the tensors as they are.
  UsesTensorNorms();

  TensorNorms tensor_norms_;
};

}  // namespace smp::optim
