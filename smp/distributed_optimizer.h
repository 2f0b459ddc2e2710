#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "optim/state_dict.h"
#include "smp/runtime.h"

namespace smp {

/// What `DistributedOptimizer` adds to an optimizer: checks, and a state keyed by parameter name
/// that moves between layouts. Internal; `save` and `load` use it.
class OptimizerCore {
 public:
  using SetState = std::function<void(const optim::OptimizerState&, const optim::ParameterNames&)>;

  OptimizerCore(torch::optim::Optimizer& optimizer, SetState set_state);

  /// Throws `UsageError` when called inside a step function.
  void check_outside_step(const char* call) const;

  /// The state of the parameters this rank owns, by name; of all of them before partitioning.
  optim::OptimizerState local_state() const;

  /// Restores a saved optimizer: options such as the learning rate now, the state of parameters,
  /// which `read` gives, now or, before partitioning, when the first step has settled who owns
  /// what: only a parameter's owner needs its state.
  void load(const std::vector<optim::OptimizerState::Group>& groups,
            std::function<std::map<std::string, optim::OptimizerState::Param>()> read);

 private:
  optim::ParameterNames names() const;

  torch::optim::Optimizer& optimizer_;
  SetState set_state_;
  std::shared_ptr<Runtime> runtime_;
};

/// A libtorch optimizer for a model whose parameters are divided among ranks: it steps those of
/// this rank. Parameters may come from `model->parameters()`, before or after the first step, or
/// from the plain module before it was wrapped. Learning-rate schedulers work on it, since it *is*
/// a `Base`.
///
/// Example:
/// \code
///   smp::DistributedOptimizer<torch::optim::AdamW> optimizer(
///       model->parameters(), torch::optim::AdamWOptions(1e-3));
/// \endcode
template <class Base>
class DistributedOptimizer : public Base {
  static_assert(std::is_base_of_v<torch::optim::Optimizer, Base>,
                "DistributedOptimizer<Base> needs a torch::optim optimizer as Base");

 public:
  template <class... Arguments>
  explicit DistributedOptimizer(std::vector<at::Tensor> parameters, Arguments&&... arguments)
      : Base(std::move(parameters), std::forward<Arguments>(arguments)...),
        core_(make_core(*this)) {}

  /// Updates this rank's parameters from their `.grad`. Throws `UsageError` inside a step function.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    core_->check_outside_step("optimizer.step()");
    return Base::step(std::move(closure));
  }

  /// Sets all gradients to undefined, or to zero. Throws `UsageError` inside a step function.
  void zero_grad(bool set_to_none = true) {
    core_->check_outside_step("optimizer.zero_grad()");
    Base::zero_grad(set_to_none);
  }

  OptimizerCore& core() const { return *core_; }

 private:
  static std::shared_ptr<OptimizerCore> make_core(Base& self) {
    return std::make_shared<OptimizerCore>(
        self, [&self](const optim::OptimizerState& state, const optim::ParameterNames& names) {
          optim::set_state(self, state, names, optim::Extra::kIgnore);
        });
  }

  std::shared_ptr<OptimizerCore> core_;
};

/// The same for an optimizer that exists already: it is stepped, saved and loaded through this
/// object, and stays usable by schedulers. The optimizer must outlive it.
template <class Base>
class DistributedOptimizerRef {
 public:
  explicit DistributedOptimizerRef(Base& optimizer)
      : optimizer_(&optimizer),
        core_(std::make_shared<OptimizerCore>(
            optimizer,
            [&optimizer](const optim::OptimizerState& state, const optim::ParameterNames& names) {
              optim::set_state(optimizer, state, names, optim::Extra::kIgnore);
            })) {}

  /// As `DistributedOptimizer::step`.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) {
    core_->check_outside_step("optimizer.step()");
    return optimizer_->step(std::move(closure));
  }

  /// As `DistributedOptimizer::zero_grad`.
  void zero_grad(bool set_to_none = true) {
    core_->check_outside_step("optimizer.zero_grad()");
    optimizer_->zero_grad(set_to_none);
  }

  /// The wrapped optimizer, for schedulers and param groups.
  Base& optimizer() const { return *optimizer_; }
  OptimizerCore& core() const { return *core_; }

 private:
  Base* optimizer_;
  std::shared_ptr<OptimizerCore> core_;
};

/// Wraps an existing optimizer: `auto optimizer = smp::distributed(adadelta);`.
template <class Base>
DistributedOptimizerRef<Base> distributed(Base& optimizer) {
  return DistributedOptimizerRef<Base>(optimizer);
}

}  // namespace smp
