// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <memory>
#include <utility>
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

/// The common part of `Adadelta`, `Lamb` and `NovoGrad`: `Options` are those of a param group, a
/// `State` is that of a parameter.
template <class Options, class State>
class SMP_API OwnOptimizer : public OwnOptions {
 public:
  /// Throws ConfigError for options out of range.
  explicit OwnOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                        Options defaults = {})
      : OwnOptions(param_groups, std::make_unique<Options>(defaults)) {
    defaults.check();
    for (const auto& group : param_groups_) static_cast<const Options&>(group.options()).check();
  }
  explicit OwnOptimizer(std::vector<torch::Tensor> params, Options defaults = {})
      : OwnOptimizer({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<State, Options>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<State, Options>(archive, *this);
  }

 protected:
  /// The state of a parameter, made at its first step.
  State& state_of(const torch::Tensor& param) {
    auto& state = state_[param.unsafeGetTensorImpl()];
    if (!state) state = std::make_unique<State>(param);
    return static_cast<State&>(*state);
  }
};

}  // namespace smp::optim
