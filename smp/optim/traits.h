// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

// Traits of optimizers that the library has to know. An optimizer of your own says it by
// specialising these templates, before it is first given to `DistributedOptimizer`.

namespace torch::optim {
class Adagrad;
class Adam;
class AdamW;
class LBFGS;
class RMSprop;
class SGD;
struct AdagradParamState;
struct AdamParamState;
struct AdamWParamState;
struct RMSpropParamState;
struct SGDParamState;
}  // namespace torch::optim

namespace smp::optim {

class Adadelta;
class FusedAdagrad;
class FusedAdam;
class FusedAdamW;
class FusedSGD;
class Lamb;
class NovoGrad;
struct AdadeltaParamState;
struct LambParamState;
struct NovoGradParamState;

/// Whether an optimizer updates each element of a parameter by this element, its gradient, its
/// state and the norms of `UsesTensorNorms`, so that pieces of parameters can be updated apart
/// (`shard_optimizer_state`). Not so for one that takes norms of layers by itself, as LARS would.
/// For an optimizer of your own:
///
///     template <>
///     struct smp::optim::IsElementwise<MyOptimizer> : std::true_type {};
///
/// It makes the state of a parameter when it first updates it, in the parameter's sizes, and passes
/// over parameters without a gradient.
template <class Optimizer>
struct IsElementwise {};

template <>
struct IsElementwise<torch::optim::SGD> : std::true_type {};
template <>
struct IsElementwise<torch::optim::Adam> : std::true_type {};
template <>
struct IsElementwise<torch::optim::AdamW> : std::true_type {};
template <>
struct IsElementwise<torch::optim::Adagrad> : std::true_type {};
template <>
struct IsElementwise<torch::optim::RMSprop> : std::true_type {};
template <>
struct IsElementwise<Adadelta> : std::true_type {};
template <>
struct IsElementwise<FusedSGD> : std::true_type {};
template <>
struct IsElementwise<FusedAdam> : std::true_type {};
template <>
struct IsElementwise<FusedAdamW> : std::true_type {};
template <>
struct IsElementwise<FusedAdagrad> : std::true_type {};
template <>
struct IsElementwise<Lamb> : std::true_type {};
template <>
struct IsElementwise<NovoGrad> : std::true_type {};
template <>
struct IsElementwise<torch::optim::LBFGS> : std::false_type {};

/// The type of an optimizer's per-parameter state, needed to restore the state of a parameter
/// that has none yet. For an optimizer of your own:
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

}  // namespace smp::optim
