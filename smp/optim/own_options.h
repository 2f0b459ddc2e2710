// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "smp/export.h"

namespace smp::optim {
namespace detail {

/// Leaves out tensors that are undefined.
SMP_API void write_field(torch::serialize::OutputArchive& archive, const char* name,
                         const c10::IValue& value);
/// The field of an archive, or, where it lacks it, none for a tensor and an internal error for
/// others.
SMP_API c10::IValue read_field(torch::serialize::InputArchive& archive, const char* name,
                               bool is_tensor);
/// Whether all fields have equal values, or are undefined both.
SMP_API bool same_fields(const std::vector<c10::IValue>& lhs, const std::vector<c10::IValue>& rhs);

}  // namespace detail

/// Base of options, and of states, which list their fields once: `Self::visit_fields(self, visit)`
/// calls `visit(name, field)` for each.
template <class Self, class Base>
class Fieldwise : public Base {
 public:
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Self::visit_fields(static_cast<const Self&>(*this), [&](const char* name, const auto& field) {
      detail::write_field(archive, name, field);
    });
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    Self::visit_fields(static_cast<Self&>(*this), [&](const char* name, auto& field) {
      using T = std::decay_t<decltype(field)>;
      const auto value = detail::read_field(archive, name, std::is_same_v<T, torch::Tensor>);
      if (!value.isNone()) field = value.template to<T>();
    });
  }
  friend bool operator==(const Self& lhs, const Self& rhs) {
    return detail::same_fields(values_of(lhs), values_of(rhs));
  }

 private:
  static std::vector<c10::IValue> values_of(const Self& self) {
    std::vector<c10::IValue> values;
    Self::visit_fields(self, [&](const char*, const auto& field) { values.emplace_back(field); });
    return values;
  }
};

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
