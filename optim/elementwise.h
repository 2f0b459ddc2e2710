#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <optional>
#include <type_traits>
#include <typeinfo>

#include "optim/adadelta.h"
#include "optim/fused.h"
#include "optim/lamb.h"
#include "optim/novograd.h"

namespace smp::optim {

/// Whether an optimizer updates each element of a parameter by this element, its gradient and its
/// state alone, so that pieces of parameters can be updated apart (`shard_optimizer_state`). Not so
/// for one that takes the norm of a layer, such as LAMB or LARS. For an optimizer of your own:
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
struct IsElementwise<Lamb> : std::false_type {};
template <>
struct IsElementwise<NovoGrad> : std::false_type {};
template <>
struct IsElementwise<torch::optim::LBFGS> : std::false_type {};

/// The answer for an optimizer of exactly one of the types above, found at run time; none for
/// another, even one that derives from them.
std::optional<bool> find_elementwise(const torch::optim::Optimizer& optimizer);

/// What an optimizer is called, and whether it is elementwise, if that is known.
struct Elementwise {
  const std::type_info* type;
  std::optional<bool> answer;

  /// Throws `UsageError` unless it is, as configuration parameter `key` asks for where it is not
  /// `usual`.
  void check(const char* key, const char* usual) const;
};

namespace detail {

template <class Optimizer, class = void>
struct ElementwiseTrait {
  static constexpr std::optional<bool> value = std::nullopt;
};

template <class Optimizer>
struct ElementwiseTrait<Optimizer, std::void_t<decltype(IsElementwise<Optimizer>::value)>> {
  static constexpr std::optional<bool> value = IsElementwise<Optimizer>::value;
};

}  // namespace detail

/// What the trait says of a type.
template <class Optimizer>
Elementwise elementwise() {
  return {&typeid(Optimizer), detail::ElementwiseTrait<Optimizer>::value};
}

/// What the trait says of an optimizer, which may be of a type that derives from `Optimizer`.
template <class Optimizer>
Elementwise elementwise_of(const Optimizer& optimizer) {
  if (typeid(optimizer) == typeid(Optimizer)) return elementwise<Optimizer>();
  return {&typeid(optimizer), find_elementwise(optimizer)};
}

}  // namespace smp::optim
