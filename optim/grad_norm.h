// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "smp/optim/uses_tensor_norms.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace smp::optim {

// torch::nn::utils::clip_grad_norm_ in three parts, by the same operators in the same order, so
// that there may be communication between them.

/// The parameters of all groups of an optimizer, in their order.
std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer);

/// The norm of order `norm_type` of one gradient: a tensor without dimensions.
at::Tensor gradient_norm(const at::Tensor& gradient, double norm_type);

/// The norm of all gradients, whose own are `norms`; a zero without any. The bits depend on their
/// order.
at::Tensor norm_of_norms(const std::vector<at::Tensor>& norms, double norm_type);

/// Multiplies by max_norm / (norm + 1e-6) where that is less than one. Undefined ones are passed
/// over.
void scale_to_norm(const std::vector<at::Tensor>& gradients, const at::Tensor& norm,
                   double max_norm);

/// The L2 norm over the gradients of parameters of this process alone, of which some may have none.
/// Throws `UsageError` if one is on another rank.
at::Tensor local_grad_norm(const std::vector<at::Tensor>& parameters);

/// The norms of tensors as this process has them.
std::vector<double> local_tensor_norms(const std::vector<TensorOfParameter>& tensors,
                                       double norm_type);

}  // namespace smp::optim
