#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>

#include <vector>

#include "smp/core/error.h"

// What the steps of optimizers have in common.
namespace smp::optim::detail {

/// What the closure returns, with gradients enabled; undefined without one.
at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure);

/// Throws `UsageError` if the parameter's gradient is sparse.
void check_dense(const char* optimizer, const at::Tensor& parameter);

/// Throws `ConfigError` unless `ok`.
void check_option(bool ok, const char* optimizer, const char* option, const char* range,
                  double value);

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
