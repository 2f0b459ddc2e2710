// SPDX-License-Identifier: Apache-2.0
#include "optim/grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/max.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/optimizer.h>

#include <limits>

#include "core/check.h"
#include "core/numbers.h"
#include "smp/optim/uses_grad_norm.h"

namespace smp::optim {
namespace {

bool is_maximum(double norm_type) { return norm_type == std::numeric_limits<double>::infinity(); }

/// Ranks that do not own a parameter have the tensor, without memory.
bool is_elsewhere(const at::Tensor& parameter) {
  return parameter.has_storage() && parameter.numel() > 0 && parameter.storage().nbytes() == 0;
}

}  // namespace

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  return parameters;
}

at::Tensor gradient_norm(const at::Tensor& gradient, double norm_type) {
  at::NoGradGuard no_grad;
  if (is_maximum(norm_type)) return gradient.abs().max();
  if (norm_type == 0) return at::ones({});  // counts
  return gradient.norm(norm_type);
}

at::Tensor norm_of_norms(const std::vector<at::Tensor>& norms, double norm_type) {
  at::NoGradGuard no_grad;
  if (norms.empty()) return at::zeros({});
  if (norm_type == 0) return at::full({}, static_cast<double>(norms.size()));
  if (norms.size() == 1) return norms[0];
  const at::Tensor all = at::stack(norms);
  return is_maximum(norm_type) ? all.max() : all.norm(norm_type);
}

void scale_to_norm(const std::vector<at::Tensor>& gradients, const at::Tensor& norm,
                   double max_norm) {
  at::NoGradGuard no_grad;
  constexpr double kEpsilon = 1e-6;  // libtorch's
  const at::Tensor factor = at::clamp(max_norm / (norm + kEpsilon), std::nullopt, 1.0);
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined()) gradient.mul_(factor);
  }
}

at::Tensor local_grad_norm(const std::vector<at::Tensor>& parameters) {
  constexpr double kL2 = 2;
  std::vector<at::Tensor> norms;
  for (const at::Tensor& parameter : parameters) {
    SMP_CHECK_WITH(UsageError, !is_elsewhere(parameter),
                   "an optimizer needs the norm of all gradients, and this rank has those of some "
                   "parameters only: one of shape ",
                   parameter.sizes(),
                   " is on another. Step it "
                   "through a DistributedOptimizer: smp::distributed(optimizer)");
    if (parameter.grad().defined()) norms.push_back(gradient_norm(parameter.grad(), kL2));
  }
  return norm_of_norms(norms, kL2);
}

std::vector<double> local_tensor_norms(const std::vector<TensorOfParameter>& tensors,
                                       double norm_type) {
  std::vector<at::Tensor> norms;
  for (const auto& [parameter, tensor] : tensors) {
    norms.push_back(gradient_norm(tensor, norm_type));
  }
  return core::read_numbers(norms);
}

UsesGradNorm::UsesGradNorm() : grad_norm_(local_grad_norm) {}

UsesTensorNorms::UsesTensorNorms() : tensor_norms_(local_tensor_norms) {}

}  // namespace smp::optim
