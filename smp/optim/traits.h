// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

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
/// It makes the state of a parameter when it first updates it, in the parameter's sizes or as
/// `StateLayout` says, and passes over parameters without a gradient.
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

/// How a tensor of an optimizer's state lies on ranks that have a parameter in parts.
struct FieldLayout {
  enum class Kind : uint8_t { kElementwise, kAlong, kWhole };
  Kind kind = Kind::kElementwise;
  std::vector<int64_t> dims;  ///< kAlong only

  /// It has an element for each of the parameter's, in the same sizes, and is cut as that.
  static FieldLayout elementwise() { return {}; }
  /// Its dimensions are these of the parameter, each at most once; negative ones count from the
  /// last. `along({0})` has a number for each row of a matrix. It is cut where one of them is;
  /// ranks that divide the parameter along another have it whole, and the same.
  static FieldLayout along(std::vector<int64_t> dims) { return {Kind::kAlong, std::move(dims)}; }
  /// It has sizes of its own, and all ranks have the same.
  static FieldLayout whole() { return {Kind::kWhole, {}}; }
};

/// Layouts by the names under which the state serialises its tensors.
using FieldLayouts = std::map<std::string, FieldLayout>;

/// The tensors of an elementwise optimizer's state that are not elementwise themselves; those
/// without dimensions are whole, if nothing else is said and the parameter has some. For an
/// optimizer of your own:
///
///     template <>
///     struct smp::optim::StateLayout<MyOptimizer> {
///       static FieldLayouts fields() {
///         return {{"row_rates", FieldLayout::along({0})}, {"factors", FieldLayout::whole()}};
///       }
///     };
///
/// Saves and loads of a parameter that ranks have in parts join and cut its state accordingly.
/// Tensors of other sizes than this says, and those that should be the same on some ranks and are
/// not, are errors. One along dimensions goes with `tensor_parallel_degree`, not with ranges of
/// elements (`shard_optimizer_state`, `sharded_data_parallel_degree`).
template <class Optimizer>
struct StateLayout {
  static FieldLayouts fields() { return {}; }
};

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
