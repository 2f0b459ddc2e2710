#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <type_traits>

#include "optim/adadelta.h"
#include "optim/lamb.h"
#include "optim/novograd.h"

namespace smp::optim {

/// The type of an optimizer's per-parameter state, needed to restore the state of a parameter
/// that has none yet. For an optimizer of your own, before the first use:
///
///     template <>
///     struct smp::optim::ParamStateOf<MyOptimizer> { using type = MyParamState; };
///
/// The type derives from `torch::optim::OptimizerParamState`, is default-constructible and
/// implements both `serialize` functions.
template <class Optimizer>
struct ParamStateOf {};

template <>
struct ParamStateOf<torch::optim::SGD> {
  using type = torch::optim::SGDParamState;
};
template <>
struct ParamStateOf<torch::optim::Adam> {
  using type = torch::optim::AdamParamState;
};
template <>
struct ParamStateOf<torch::optim::AdamW> {
  using type = torch::optim::AdamWParamState;
};
template <>
struct ParamStateOf<torch::optim::Adagrad> {
  using type = torch::optim::AdagradParamState;
};
template <>
struct ParamStateOf<torch::optim::RMSprop> {
  using type = torch::optim::RMSpropParamState;
};
template <>
struct ParamStateOf<Adadelta> {
  using type = AdadeltaParamState;
};

template <>
struct ParamStateOf<Lamb> {
  using type = LambParamState;
};
template <>
struct ParamStateOf<NovoGrad> {
  using type = NovoGradParamState;
};

/// Makes an empty state for one parameter.
using ParamStateFactory = std::unique_ptr<torch::optim::OptimizerParamState> (*)();

/// Throws UsageError for LBFGS, which has one state for all parameters together.
void check_state_per_parameter(const torch::optim::Optimizer& optimizer);

/// The factory for `optimizer`, found at run time among the optimizers listed above and what
/// derives from them. Throws UsageError for LBFGS, and one that names the trait for any other.
ParamStateFactory param_state_factory(const torch::optim::Optimizer& optimizer);

namespace detail {

template <class State>
std::unique_ptr<torch::optim::OptimizerParamState> make_param_state() {
  return std::make_unique<State>();
}

template <class Optimizer, class = void>
struct FactoryOf {
  static ParamStateFactory get(const Optimizer& optimizer) {
    return param_state_factory(optimizer);
  }
};

template <class Optimizer>
struct FactoryOf<Optimizer, std::void_t<typename ParamStateOf<Optimizer>::type>> {
  static ParamStateFactory get(const Optimizer&) {
    return make_param_state<typename ParamStateOf<Optimizer>::type>;
  }
};

}  // namespace detail
}  // namespace smp::optim
