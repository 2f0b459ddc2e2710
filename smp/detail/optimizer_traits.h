// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <type_traits>
#include <typeinfo>

#include "smp/export.h"
#include "smp/optim/traits.h"

namespace torch::optim {
class Optimizer;
class OptimizerParamState;
}  // namespace torch::optim

/// Asks the traits of optimizers. Internal.
namespace smp::optim::detail {

/// An optimizer's type, whether it is elementwise, if that is known, and the fields of its state
/// that are not.
struct Traits {
  const std::type_info* type;
  std::optional<bool> is_elementwise;
  FieldLayouts fields;
};

template <class Optimizer, class = void>
struct ElementwiseTrait {
  static constexpr std::optional<bool> value = std::nullopt;
};

template <class Optimizer>
struct ElementwiseTrait<Optimizer, std::void_t<decltype(IsElementwise<Optimizer>::value)>> {
  static constexpr std::optional<bool> value = IsElementwise<Optimizer>::value;
};

/// The answer for an optimizer of exactly one of the types that the library knows, found at run
/// time; none for another, even one that derives from them.
SMP_API std::optional<bool> find_elementwise(const torch::optim::Optimizer& optimizer);

/// The traits of an optimizer's type.
template <class Optimizer>
Traits traits() {
  return {&typeid(Optimizer), ElementwiseTrait<Optimizer>::value, StateLayout<Optimizer>::fields()};
}

/// The traits of an optimizer, which may be of a type that derives from `Optimizer`.
template <class Optimizer>
Traits traits_of(const Optimizer& optimizer) {
  if (typeid(optimizer) == typeid(Optimizer)) return traits<Optimizer>();
  return {&typeid(optimizer), find_elementwise(optimizer), {}};
}

/// Makes an empty state for one parameter.
using ParamStateFactory = std::unique_ptr<torch::optim::OptimizerParamState> (*)();

template <class State>
std::unique_ptr<torch::optim::OptimizerParamState> make_param_state() {
  return std::make_unique<State>();
}

/// The factory for `optimizer`, found at run time among the optimizers that the library knows and
/// their derived classes. Throws `UsageError` for LBFGS, which has one state for all parameters,
/// and one that names the trait for any other.
SMP_API ParamStateFactory find_param_state_factory(const torch::optim::Optimizer& optimizer);

template <class Optimizer, class = void>
struct StateTrait {
  static ParamStateFactory factory(const Optimizer& optimizer) {
    return find_param_state_factory(optimizer);
  }
};

template <class Optimizer>
struct StateTrait<Optimizer, std::void_t<typename ParamStateOf<Optimizer>::type>> {
  static ParamStateFactory factory(const Optimizer&) {
    return make_param_state<typename ParamStateOf<Optimizer>::type>;
  }
};

/// The trait of `Optimizer`, else the factory found at run time.
template <class Optimizer>
ParamStateFactory param_state_factory(const Optimizer& optimizer) {
  return StateTrait<Optimizer>::factory(optimizer);
}

}  // namespace smp::optim::detail
