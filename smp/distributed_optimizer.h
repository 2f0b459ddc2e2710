// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <type_traits>
#include <utility>
#include <vector>

#include "smp/detail/optimizer_traits.h"
#include "smp/optimizer_core.h"

namespace smp {

/// A libtorch optimizer for a model whose parameters are divided among ranks: it steps those of
/// this rank. Parameters may come from `model->parameters()`, before or after the first step, or
/// from the plain module before it was wrapped. Learning-rate schedulers work on it, since it *is*
/// a `Base`; its other methods are `OptimizerCore`'s. It stays where it was made: the library
/// refers to it.
///
/// Example:
/// \code
///   smp::DistributedOptimizer<torch::optim::AdamW> optimizer(
///       model->parameters(), torch::optim::AdamWOptions(1e-3));
/// \endcode
template <class Base>
class DistributedOptimizer : public Base, public OptimizerCore {
  static_assert(std::is_base_of_v<torch::optim::Optimizer, Base>,
                "DistributedOptimizer<Base> needs a torch::optim optimizer as Base");

 public:
  template <class... Arguments>
  explicit DistributedOptimizer(std::vector<at::Tensor> parameters, Arguments&&... arguments)
      : Base(std::move(parameters), std::forward<Arguments>(arguments)...),
        OptimizerCore(static_cast<Base&>(*this), optim::detail::traits<Base>()) {}

  /// Takes param groups, each with options of its own or the optimizer's.
  template <class... Arguments>
  explicit DistributedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                Arguments&&... arguments)
      : Base(groups, std::forward<Arguments>(arguments)...),
        OptimizerCore(static_cast<Base&>(*this), optim::detail::traits<Base>()) {}

  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer(DistributedOptimizer&&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(DistributedOptimizer&&) = delete;

  /// Updates this rank's parameters from their `.grad`. With `shard_optimizer_state` it updates
  /// this rank's pieces and sends them to all replicas, so it is collective. Throws `UsageError`
  /// inside a step function.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    return OptimizerCore::step([this](auto inner) { return Base::step(std::move(inner)); },
                               closure);
  }

  /// Does the same as `OptimizerCore::zero_grad`.
  using OptimizerCore::zero_grad;
};

/// The same for an optimizer that exists already: it is stepped, saved and loaded through this
/// object, and stays usable by schedulers. The optimizer must outlive it and stay where it is.
template <class Base>
class DistributedOptimizerRef : public OptimizerCore {
 public:
  explicit DistributedOptimizerRef(Base& optimizer)
      : OptimizerCore(optimizer, optim::detail::traits_of(optimizer)), optimizer_(&optimizer) {}

  /// Does the same as `DistributedOptimizer::step`.
  at::Tensor step(LossClosure closure = nullptr) const {
    return OptimizerCore::step([this](auto inner) { return optimizer_->step(std::move(inner)); },
                               closure);
  }

  /// The wrapped optimizer, for schedulers and param groups.
  Base& optimizer() const { return *optimizer_; }

 private:
  Base* optimizer_;
};

/// Wraps an existing optimizer: `auto optimizer = smp::distributed(adadelta);`.
template <class Base>
[[nodiscard]] DistributedOptimizerRef<Base> distributed(Base& optimizer) {
  return DistributedOptimizerRef<Base>(optimizer);
}

}  // namespace smp
