// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "smp/detail/optimizer_traits.h"
#include "smp/export.h"
#include "smp/loss_scale_options.h"
#include "smp/optimizer_state.h"

namespace smp {

namespace runtime {
class Optimizer;
}  // namespace runtime

/// The methods of a `DistributedOptimizer`, or of the result of `smp::distributed`, that do not
/// depend on the optimizer's type. Those for half precision have SMP's names; see
/// docs/precision.md.
class SMP_API OptimizerCore {
 public:
  /// Sets all gradients to undefined, or to zero. Throws `UsageError` inside a step function.
  void zero_grad(bool set_to_none = true) const;

  /// Copies of the state of all parameters by name, and of the param groups, on every rank. Before
  /// the first step it is this rank's own state. Collective over the pipeline and its
  /// tensor-parallel groups, and over all ranks with `shard_optimizer_state` or sharded data
  /// parallelism. Throws `UsageError` inside a step function.
  OptimizerState state_dict() const;

  /// Copies of the state of the parameters that this rank owns, and of its parts of those that a
  /// tensor-parallel group divides. If replicas divide the state, each gets all of it for these
  /// parameters with `gather_if_shard`, which is collective over the replicas. Otherwise each gets
  /// its pieces, named by the elements of the parameter's memory, such as "fc.weight[0:64]". Throws
  /// `UsageError` before the first step.
  OptimizerState local_state_dict(bool gather_if_shard = true) const;

  /// Restores a result of `state_dict`, on any number of ranks, or of `local_state_dict`, on the
  /// ranks that it was taken from. Options of the groups are restored at once, the state of
  /// parameters as soon as their owners are known, at the first step at the latest. Throws one
  /// `CheckpointError` that lists all that is missing, unexpected or of another shape; then nothing
  /// has changed.
  void load_state_dict(const OptimizerState& state) const;

  /// Sets a static or dynamic loss scale: `model->backward` multiplies the loss by it, and `step()`
  /// divides the gradients, or does nothing if a gradient is not finite on some rank. Called before
  /// the first step. Throws `UsageError` if another optimizer scales the loss.
  void scale_loss(const LossScaleOptions& options) const;

  /// Whether the last step was skipped because a gradient was not finite on some rank; after
  /// `clip_master_grads`, whether the next one will be. The program then leaves out the scheduler's
  /// step.
  bool overflow() const;
  /// The factor of the loss.
  double loss_scale() const;

  /// Divides the gradients by the loss scale and scales them so that the norm over all of them is
  /// at most `max_norm`. Returns the norm before, or -1 after an overflow. Called between the step
  /// function and `step()`; collective over the world.
  double clip_master_grads(double max_norm, double norm_type = 2) const;

  /// Gives master weights the values that the parameters have now: for programs that have written
  /// into parameters. `load_state_dict` and `smp::load` do so by themselves.
  void reload_model_params() const;

  /// The state of a dynamic loss scale, text of JSON; "{}" without one. `smp::save` stores it.
  /// `load_loss_scaler_state` restores it, and does nothing where the optimizer or the state has
  /// none. Throws `CheckpointError` for text of another form.
  std::string loss_scaler_state() const;
  void load_loss_scaler_state(const std::string& state) const;

  /// The library's record of the optimizer; its type is internal.
  runtime::Optimizer& impl() const { return *optimizer_; }

 protected:
  using LossClosure = std::function<at::Tensor()>;

  /// For an optimizer of type `Base` that outlives this. Throws `UsageError` before `smp::init`,
  /// and where the configuration divides parameters and the optimizer cannot update parts of them.
  template <class Base>
  OptimizerCore(Base& optimizer, const optim::detail::Traits& traits)
      : OptimizerCore(
            optimizer,
            [](const torch::optim::Optimizer& untyped) {
              return optim::detail::param_state_factory(static_cast<const Base&>(untyped));
            },
            traits) {}
  ~OptimizerCore() = default;
  OptimizerCore(const OptimizerCore&) = default;
  OptimizerCore& operator=(const OptimizerCore&) = default;

  /// `update` is the optimizer's own step, which a step that overflowed skips.
  at::Tensor step(const std::function<at::Tensor(LossClosure)>& update,
                  const LossClosure& closure) const;

 private:
  using StateFactory = optim::detail::ParamStateFactory (*)(const torch::optim::Optimizer&);
  OptimizerCore(torch::optim::Optimizer& optimizer, StateFactory state_factory,
                const optim::detail::Traits& traits);

  std::shared_ptr<runtime::Optimizer> optimizer_;
};

}  // namespace smp
