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
#include "runtime/runtime.h"
#include "runtime/update/loss_scaling.h"
#include "runtime/update/optimizer_pieces.h"
#include "smp/detail/optimizer_traits.h"
#include "smp/mixed_precision.h"

namespace smp {

/// What `DistributedOptimizer` adds to an optimizer: checks, the division of its work among
/// replicas, and a state keyed by parameter name that moves between layouts. Internal; `save` and
/// `load` use it, and the optimizers' `state_dict` and the like.
class OptimizerCore {
 public:
  using SetState = OptimizerPieces::SetState;
  using LossClosure = OptimizerPieces::LossClosure;
  /// Gives the states of the parameters whose names are wanted.
  using Read = std::function<std::map<std::string, optim::OptimizerState::Param>(
      const std::function<bool(const std::string&)>& wanted)>;

  /// Throws `UsageError` for an optimizer that cannot update parts of parameters, where the
  /// configuration divides them.
  OptimizerCore(torch::optim::Optimizer& optimizer, SetState set_state,
                const optim::detail::Elementwise& elementwise);

  /// `update` is the optimizer's own step, which a step that overflowed skips. Throws `UsageError`
  /// inside a step function.
  at::Tensor step(const OptimizerPieces::Update& update, const LossClosure& closure);
  void zero_grad(bool set_to_none);

  /// As `DistributedOptimizer`'s.
  optim::OptimizerState state_dict();
  optim::OptimizerState local_state_dict(bool gather_if_shard);
  void load_state_dict(const optim::OptimizerState& state);

  /// The state of the parameters this rank owns, by name; of all of them before partitioning. Of
  /// what a tensor-parallel group divides, that of this rank's part. With `shard_optimizer_state`,
  /// every replica has that of some of them, and it is collective over the replicas.
  optim::OptimizerState local_state();

  /// Restores a saved optimizer: options such as the learning rate now, the state of parameters
  /// now or, before partitioning, when the first step has settled who owns what: only owners of a
  /// parameter, or of a piece of it, need its state.
  void load(const std::vector<optim::OptimizerState::Group>& groups, Read read);

  /// What this rank's part of the next update would read; see `OptimizerPieces`.
  std::vector<at::Tensor> gradients() { return pieces_.gradients(); }
  LossScaling& loss_scaling() { return loss_scaling_; }
  /// As documented in `MixedPrecision`.
  double clip_master_grads(double max_norm, double norm_type);
  void reload_model_params();

 private:
  optim::OptimizerState own_part(optim::OptimizerState state) const;
  bool divides() const;
  void check_fits(const optim::OptimizerState& state) const;
  void check_complete(const optim::OptimizerState& state,
                      const std::function<bool(const std::string&)>& wanted) const;
  std::vector<optim::OptimizerState::Group> complete_groups(
      const optim::OptimizerState& state) const;

  torch::optim::Optimizer& optimizer_;
  SetState set_state_;
  std::shared_ptr<Runtime> runtime_;
  OptimizerPieces pieces_;
  LossScaling loss_scaling_;
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
class DistributedOptimizer : public Base, public MixedPrecision<DistributedOptimizer<Base>> {
  static_assert(std::is_base_of_v<torch::optim::Optimizer, Base>,
                "DistributedOptimizer<Base> needs a torch::optim optimizer as Base");

 public:
  template <class... Arguments>
  explicit DistributedOptimizer(std::vector<at::Tensor> parameters, Arguments&&... arguments)
      : Base(std::move(parameters), std::forward<Arguments>(arguments)...),
        core_(make_core(*this)) {}

  /// With param groups, each with options of its own or the optimizer's.
  template <class... Arguments>
  explicit DistributedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                Arguments&&... arguments)
      : Base(groups, std::forward<Arguments>(arguments)...), core_(make_core(*this)) {}

  /// Updates this rank's parameters from their `.grad`; with `shard_optimizer_state` its pieces of
  /// them, which then go to all replicas, so that it is collective. Throws `UsageError` inside a
  /// step function.
  at::Tensor step(OptimizerCore::LossClosure closure = nullptr) override {
    return core_->step([this](auto inner) { return Base::step(std::move(inner)); }, closure);
  }

  /// Sets all gradients to undefined, or to zero. Throws `UsageError` inside a step function.
  void zero_grad(bool set_to_none = true) { core_->zero_grad(set_to_none); }

  /// Copies of the state of all parameters by name, and of the param groups, on every rank; of this
  /// rank's before the first step. Collective over the pipeline and its tensor-parallel groups, and
  /// over all ranks with `shard_optimizer_state` or sharded data parallelism. Throws `UsageError`
  /// inside a step function.
  optim::OptimizerState state_dict() { return core_->state_dict(); }

  /// Copies of the state of the parameters that this rank owns, and of its parts of those that a
  /// tensor-parallel group divides. Where replicas divide the state,
  /// with `gather_if_shard` all of it for these parameters, on every replica, collectively over
  /// them; without, this rank's pieces, under names such as "fc.weight[0:64]" that say which
  /// elements of the parameter's memory they are for. Throws `UsageError` before the first step.
  optim::OptimizerState local_state_dict(bool gather_if_shard = true) {
    return core_->local_state_dict(gather_if_shard);
  }

  /// Restores what `state_dict` gave, on any number of ranks, or `local_state_dict`, on the ranks
  /// that it was taken from: the options of the groups now, the state of parameters now or when the
  /// first step has settled who owns what. Throws one `CheckpointError` that lists all that is
  /// missing, unexpected or of another shape; then nothing has changed.
  void load_state_dict(const optim::OptimizerState& state) { core_->load_state_dict(state); }

  OptimizerCore& core() const { return *core_; }

 private:
  static std::shared_ptr<OptimizerCore> make_core(Base& self) {
    return std::make_shared<OptimizerCore>(
        self,
        [&self](const optim::OptimizerState& state, const optim::ParameterNames& names) {
          optim::set_state(self, state, names, optim::Extra::kIgnore,
                           optim::detail::param_state_factory(self));
        },
        optim::detail::elementwise<Base>());
  }

  std::shared_ptr<OptimizerCore> core_;
};

/// The same for an optimizer that exists already: it is stepped, saved and loaded through this
/// object, and stays usable by schedulers. The optimizer must outlive it.
template <class Base>
class DistributedOptimizerRef : public MixedPrecision<DistributedOptimizerRef<Base>> {
 public:
  explicit DistributedOptimizerRef(Base& optimizer)
      : optimizer_(&optimizer),
        core_(std::make_shared<OptimizerCore>(
            optimizer,
            [&optimizer](const optim::OptimizerState& state, const optim::ParameterNames& names) {
              optim::set_state(optimizer, state, names, optim::Extra::kIgnore,
                               optim::detail::param_state_factory(optimizer));
            },
            optim::detail::elementwise_of(optimizer))) {}

  /// As `DistributedOptimizer::step`.
  at::Tensor step(OptimizerCore::LossClosure closure = nullptr) {
    return core_->step([this](auto inner) { return optimizer_->step(std::move(inner)); }, closure);
  }

  /// As `DistributedOptimizer::zero_grad`.
  void zero_grad(bool set_to_none = true) { core_->zero_grad(set_to_none); }

  /// As `DistributedOptimizer::state_dict` and the others.
  optim::OptimizerState state_dict() { return core_->state_dict(); }
  optim::OptimizerState local_state_dict(bool gather_if_shard = true) {
    return core_->local_state_dict(gather_if_shard);
  }
  void load_state_dict(const optim::OptimizerState& state) { core_->load_state_dict(state); }

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
