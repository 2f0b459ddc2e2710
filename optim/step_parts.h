// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>

#include <tuple>
#include <vector>

#include "core/check.h"

// The common part of the steps of optimizers.
namespace smp::optim::detail {

/// The value of the closure, with gradients enabled; undefined without one.
at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure);

/// Throws `UsageError` if the parameter's gradient is sparse.
void check_dense(const char* optimizer, const at::Tensor& parameter);

/// Throws `ConfigError` unless `ok`.
void check_option(bool ok, const char* optimizer, const char* option, const char* range,
                  double value);

/// Throws `ConfigError` for a lr, betas, eps or weight_decay that no optimizer of Adam's kind
/// takes.
template <class Options>
void check_adam_options(const char* optimizer, const Options& options) {
  const auto check = [&](const char* name, double value) {
    check_option(value >= 0, optimizer, name, "at least 0", value);
  };
  check("lr", options.lr());
  for (double beta : {std::get<0>(options.betas()), std::get<1>(options.betas())}) {
    check_option(beta >= 0 && beta < 1, optimizer, "betas", "0 to less than 1", beta);
  }
  check("eps", options.eps());
  check("weight_decay", options.weight_decay());
}

/// Equal values, or both undefined.
bool same_tensor(const at::Tensor& a, const at::Tensor& b);

/// Calls update(parameter, options) for each parameter that has a gradient, which must be dense.
template <class Options, class Update>
void for_each_gradient(std::vector<torch::optim::OptimizerParamGroup>& groups,
                       const char* optimizer, const Update& update) {
  for (auto& group : groups) {
    const auto& options = static_cast<const Options&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      check_dense(optimizer, parameter);
      update(parameter, options);
    }
  }
}

}  // namespace smp::optim::detail
