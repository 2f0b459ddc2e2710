// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <typeinfo>
#include <vector>

#include "optim/state_dict.h"
#include "runtime/runtime.h"
#include "runtime/update/loss_scaling.h"
#include "runtime/update/optimizer_pieces.h"
#include "smp/detail/optimizer_traits.h"

namespace smp::runtime {

/// The additions of `DistributedOptimizer` to an optimizer: checks, the division of its work among
/// replicas, and a state keyed by parameter name that moves between layouts. The methods that users
/// call are documented in `smp::OptimizerCore`.
class Optimizer : public std::enable_shared_from_this<Optimizer> {
 public:
  using LossClosure = OptimizerPieces::LossClosure;
  /// Gives the states of the parameters whose names are wanted.
  using Read = std::function<std::map<std::string, OptimizerState::Param>(
      const std::function<bool(const std::string&)>& wanted)>;

  /// Gives the factory of the state of an optimizer's parameters; throws `UsageError` where that is
  /// not known.
  using StateFactory = optim::detail::ParamStateFactory (*)(const torch::optim::Optimizer&);
  /// Gives the number of tensors of a parameter's size that are its state, by its group; none where
  /// that is not known.
  using StateTensors = std::optional<int64_t> (*)(const torch::optim::Optimizer&,
                                                  const torch::optim::OptimizerParamGroup&);

  /// `optimizer` must outlive this. Throws `UsageError` for one that cannot update parts of
  /// parameters, where the configuration divides them, and for LBFGS where ranks have some each.
  Optimizer(torch::optim::Optimizer& optimizer, StateFactory state_factory,
            StateTensors state_tensors, const optim::detail::Traits& traits);

  /// `update` is the optimizer's own step, which a step that overflowed skips, and whose place
  /// `optim::foreach_step` takes where it can. Throws `UsageError` inside a step function.
  at::Tensor step(const OptimizerPieces::Update& update, const LossClosure& closure);
  void zero_grad(bool set_to_none);

  OptimizerState state_dict();
  OptimizerState local_state_dict(bool gather_if_shard);
  void load_state_dict(const OptimizerState& state);

  /// The state of the parameters this rank owns, by name; of all of them before partitioning. For
  /// divided parameters, that of this rank's part. With `shard_optimizer_state`, every replica has
  /// that of some of them, and it is collective over the replicas. Tensors may be the optimizer's
  /// own, which the next step changes.
  OptimizerState local_state();

  /// Throws `CheckpointError` unless `load` can take the state of checkpoint `path`, whose tensors
  /// need no data: with `strict` if it has other parameters than this optimizer, or in other
  /// groups; in any case if a parameter has another shape, or its state other fields or, where the
  /// parameter is divided, fields of other sizes.
  void check_loadable(const OptimizerState& saved, const std::string& path, bool strict) const;

  /// Restores a saved optimizer: options such as the learning rate now, the state of parameters now
  /// or, before partitioning, when the first step has settled owners: only owners of a parameter,
  /// or of a piece of it, need its state. Until then `read` stands for it.
  void load(const std::vector<OptimizerState::Group>& groups, Read read);

  /// The names of its parameters, on any rank.
  std::set<std::string> parameters() const;

  /// Calls `visit` with its parameters and how many tensors of their size are their state, as far
  /// as that is known.
  void for_each_state(
      const std::function<void(const at::Tensor& parameter, int64_t tensors)>& visit) const;

  /// The gradients that this rank's part of the next update would read; see `OptimizerPieces`.
  std::vector<at::Tensor> gradients() { return pieces_.gradients(); }
  /// Gives the tensor from which it would go on for a parameter; as `OptimizerPieces::updated`.
  at::Tensor updated(const at::Tensor& parameter) const { return pieces_.updated(parameter); }
  /// How the fields of `local_state` lie.
  const StateFields& fields() const { return fields_; }
  LossScaling& loss_scaling() { return loss_scaling_; }
  double clip_master_grads(double max_norm, double norm_type);
  void reload_model_params();

 private:
  /// A state that was loaded before partitioning.
  struct Waiting {
    Read read;
    int64_t parameter_loads;  // before those of its checkpoint
  };

  void take_waiting();
  void set_loaded(const std::vector<OptimizerState::Group>& groups);
  std::vector<OptimizerState::Group> groups_now() const;
  struct Groups;
  Groups compare_groups(const std::vector<OptimizerState::Group>& saved) const;
  struct Dictionary;
  std::string other_shapes(const OptimizerState& saved) const;
  bool has_gradient() const;
  void check_trained();
  bool divides() const;
  void check_fits(const Dictionary& given) const;
  void check_complete(const Dictionary& given,
                      const std::function<bool(const std::string&)>& wanted) const;
  std::vector<OptimizerState::Group> complete_groups(const OptimizerState& state) const;

  torch::optim::Optimizer& optimizer_;
  const StateFields fields_;
  OptimizerPieces::SetState set_state_;
  std::shared_ptr<Runtime> runtime_;
  OptimizerPieces pieces_;
  LossScaling loss_scaling_;
  const std::type_info& type_;  // type of the optimizer whose step it does
  StateFactory state_factory_;
  StateTensors state_tensors_;
  std::optional<Waiting> waiting_;
  // The watch's counts at the last step, and whether gradients were dropped since.
  int64_t trainings_ = 0, evaluations_ = 0;
  bool dropped_ = false;
  bool warned_ = false;
};

/// Throws `UsageError` for a parameter that two of the optimizers update: a checkpoint has one
/// state of it. `call` is the user's call, for errors.
void check_no_common_parameters(const std::vector<Optimizer*>& optimizers, const std::string& call);

}  // namespace smp::runtime
