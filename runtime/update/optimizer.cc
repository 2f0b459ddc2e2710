// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/optimizer.h"

#include <c10/util/Type.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "graph/absent.h"
#include "optim/elementwise.h"
#include "optim/foreach_step.h"
#include "optim/grad_norm.h"
#include "runtime/model.h"
#include "runtime/parameters/dividing.h"
#include "runtime/update/average.h"
#include "runtime/update/clip_grad.h"
#include "runtime/update/complete_gradients.h"
#include "runtime/update/divided_states.h"
#include "runtime/update/update_watch.h"
#include "smp/optim/uses_grad_norm.h"
#include "smp/optim/uses_tensor_norms.h"

namespace smp::runtime {
namespace {

/// Optimizers that clip by the norm of all gradients take that over all ranks, of the parameters
/// that are in the groups now: others stand in for them while the optimizer works.
void give_grad_norm(torch::optim::Optimizer& optimizer) {
  auto* const user = dynamic_cast<optim::UsesGradNorm*>(&optimizer);
  if (user == nullptr) return;
  user->set_grad_norm([parameters = optim::parameters_of(optimizer)](const auto&) {
    return grad_norm(parameters);
  });
}

/// While it lives, an optimizer that asks for norms of tensors is given those of wholes.
class WholeNorms {
 public:
  WholeNorms(torch::optim::Optimizer& optimizer, const OptimizerPieces& pieces)
      : user_(dynamic_cast<optim::UsesTensorNorms*>(&optimizer)) {
    if (user_ == nullptr) return;
    user_->set_tensor_norms([&pieces](const auto& tensors, double norm_type) {
      return pieces.norms_of(tensors, norm_type);
    });
  }
  ~WholeNorms() {
    if (user_ != nullptr) user_->set_tensor_norms(optim::local_tensor_norms);
  }
  WholeNorms(const WholeNorms&) = delete;
  WholeNorms& operator=(const WholeNorms&) = delete;

 private:
  optim::UsesTensorNorms* const user_;
};

}  // namespace

Optimizer::Optimizer(torch::optim::Optimizer& optimizer, StateFactory state_factory,
                     StateTensors state_tensors, const optim::detail::Traits& traits)
    : optimizer_(optimizer),
      fields_{c10::demangle(traits.type->name()), traits.fields},
      set_state_([this, state_factory](const auto& state, const auto& names) {
        optim::set_state(optimizer_, state, names, state_factory(optimizer_), fields_.layouts);
      }),
      runtime_(Runtime::get_shared()),
      pieces_(optimizer, *runtime_, set_state_, fields_),
      loss_scaling_(runtime_, pieces_),
      type_(*traits.type),
      state_factory_(state_factory),
      state_tensors_(state_tensors) {
  if (runtime_->shards_optimizer_state())
    optim::check_of_ranges(traits, "shard_optimizer_state", "false");
  if (runtime_->is_tensor_parallel())
    optim::check_elementwise(traits, "tensor_parallel_degree", "1");
  if (runtime_->config().sharded_data_parallel_degree() > 1)
    optim::check_of_ranges(traits, "sharded_data_parallel_degree", "1");
  const int partitions = runtime_->topology().pp_size();
  SMP_CHECK_WITH(UsageError,
                 partitions == 1 || dynamic_cast<torch::optim::LBFGS*>(&optimizer) == nullptr,
                 "torch::optim::LBFGS finds one direction for all parameters together, and with "
                 "\"partitions\" ",
                 partitions,
                 " each rank has the gradients of some of them only. Use one partition or another "
                 "optimizer");
}

at::Tensor Optimizer::step(const OptimizerPieces::Update& update, const LossClosure& closure) {
  begin_use_of_gradients("optimizer.step()");
  check_no_average_in_use(runtime_->models(), "optimizer.step()");
  std::optional<OwnUse> parameters;  // a closure is the program's
  if (!closure) parameters.emplace(*runtime_);
  if (!closure) check_trained();
  const UpdateWatch::Updating updating(*runtime_->update_watch);
  runtime_->update_watch->before_update();
  if (!loss_scaling_.begin_step(closure != nullptr)) return {};
  give_grad_norm(optimizer_);
  const WholeNorms norms(optimizer_, pieces_);
  const auto update_all = [&](const LossClosure& inner) {
    const bool done = !inner && optim::foreach_step(optimizer_, type_, graph::is_absent);
    return done ? at::Tensor() : update(inner);
  };
  at::Tensor loss = pieces_.step(update_all, closure);
  runtime_->update_watch->after_update();
  return loss;
}

void Optimizer::for_each_state(
    const std::function<void(const at::Tensor& parameter, int64_t tensors)>& visit) const {
  for (const auto& group : optimizer_.param_groups()) {
    const auto tensors = state_tensors_(optimizer_, group);
    if (!tensors) continue;
    for (const at::Tensor& parameter : group.params()) visit(parameter, *tensors);
  }
}

bool Optimizer::has_gradient() const {
  const auto parameters = optim::parameters_of(optimizer_);
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const at::Tensor& parameter) { return parameter.grad().defined(); });
}

/// Without gradients libtorch does nothing and says nothing. Where steps were called and none
/// trained, a model->backward is missing.
void Optimizer::check_trained() {
  const UpdateWatch& watch = *runtime_->update_watch;
  const bool idle = watch.trainings() == trainings_ && watch.evaluations() > evaluations_;
  const bool has_none = !has_gradient();
  SMP_CHECK_WITH(UsageError, !has_none || watch.trainings() + watch.evaluations() > 0,
                 "optimizer.step() was called before any step function, so there are no gradients. "
                 "First call a step function that calls model->backward(loss)");
  SMP_CHECK_WITH(UsageError, !idle || watch.trainings() > 0 || !has_none,
                 "optimizer.step() was called, and no step function has trained so far: \"",
                 watch.last_evaluation(),
                 "\" calls no model->backward, so it was an evaluation and made no gradients. Call "
                 "model->backward(loss) in it");
  if (idle && (dropped_ || has_none) && !std::exchange(warned_, true)) {
    core::log_warning(
        "optimizer.step() was called, and no step function has trained since it was called "
        "before: \"" +
        watch.last_evaluation() +
        "\" called no model->backward this time, so it was an evaluation and made no "
        "gradients. Call model->backward(loss) in it, or leave out optimizer.step()");
  }
  trainings_ = watch.trainings();
  evaluations_ = watch.evaluations();
  dropped_ = false;
}

void Optimizer::zero_grad(bool set_to_none) {
  begin_use_of_gradients("optimizer.zero_grad()");
  pieces_.zero_grad(set_to_none);
  dropped_ = true;
  loss_scaling_.forget();
}

double Optimizer::clip_master_grads(double max_norm, double norm_type) {
  begin_use_of_gradients("optimizer.clip_master_grads()");
  if (!loss_scaling_.unscale()) return -1;
  return clip_grad_norm_(optim::parameters_of(optimizer_), max_norm, norm_type);
}

void Optimizer::reload_model_params() {
  begin_use_of_gradients("optimizer.reload_model_params()");
  check_no_average_in_use(runtime_->models(), "optimizer.reload_model_params()");
  const OwnUse parameters(*runtime_);
  pieces_.reload_masters();
}

OptimizerState Optimizer::local_state() {
  const OwnUse parameters(*runtime_);
  take_waiting();
  if (!waiting_) {
    OptimizerState state = pieces_.gather_state();
    optim::erase_params(state, [&](const std::string& name) { return !runtime_->owns(name); });
    return state;
  }
  const auto groups = groups_now();
  std::set<std::string> names;
  for (const auto& group : groups) names.insert(group.params.begin(), group.params.end());
  const auto wanted = [&](const std::string& name) { return names.count(name) > 0; };
  OptimizerState state{waiting_->read(wanted), groups};
  cut_states(*runtime_, fields_, state);
  return state;
}

void Optimizer::load(const std::vector<OptimizerState::Group>& groups, Read read) {
  const auto models = runtime_->models();
  SMP_INTERNAL_ASSERT(!models.empty(), "smp::load loads a model with the optimizer");
  const bool waits = waiting_.has_value();  // and the hook is registered
  waiting_ = Waiting{std::move(read), runtime_->progress.parameter_loads};
  if (runtime_->partitioned()) {
    set_loaded(groups);
    return;
  }
  set_state_({{}, groups}, parameter_names(*runtime_));
  if (waits) return;
  models.front()->register_post_partition_hook([weak = weak_from_this()] {
    if (const auto alive = weak.lock()) alive->take_waiting();  // the program may have dropped it
  });
}

/// The groups with the options that they have now.
std::vector<OptimizerState::Group> Optimizer::groups_now() const {
  return optim::share_state(optimizer_, parameter_names(*runtime_)).groups;
}

/// A scheduler may have changed the options since the state was loaded.
void Optimizer::take_waiting() {
  if (waiting_ && runtime_->partitioned()) set_loaded(groups_now());
}

/// Gives this rank's parameters, or pieces of them, the state that was loaded.
void Optimizer::set_loaded(const std::vector<OptimizerState::Group>& groups) {
  const OwnUse parameters(*runtime_);
  const Waiting loaded = *std::exchange(waiting_, std::nullopt);
  const auto wanted = [&](const std::string& name) {
    return runtime_->owns(name) && !pieces_.name_of_piece(name).empty();
  };
  pieces_.set_state({loaded.read(wanted), groups}, loaded.parameter_loads);
}

void check_no_common_parameters(const std::vector<Optimizer*>& optimizers,
                                const std::string& call) {
  std::set<std::string> all;
  for (const Optimizer* optimizer : optimizers) {
    std::set<std::string> repeated = optimizer->parameters();
    all.merge(repeated);
    SMP_CHECK_WITH(UsageError, repeated.empty(), call, ": two optimizers have parameter \"",
                   *repeated.begin(),
                   "\", and a checkpoint has one state of it. Save them under two paths, or give "
                   "each optimizer parameters of its own");
  }
}

}  // namespace smp::runtime
