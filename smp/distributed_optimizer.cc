#include "smp/distributed_optimizer.h"

#include <algorithm>

#include "smp/core/error.h"
#include "smp/model_core.h"

namespace smp {

OptimizerCore::OptimizerCore(torch::optim::Optimizer& optimizer, SetState set_state)
    : optimizer_(optimizer), set_state_(std::move(set_state)), runtime_(Runtime::get_shared()) {}

void OptimizerCore::check_outside_step(const char* call) const {
  SMP_CHECK_WITH(UsageError, !runtime_->in_step, call,
                 " was called inside a step function. Gradients are complete when the step has "
                 "returned: call it after the step");
}

optim::ParameterNames OptimizerCore::names() const {
  optim::ParameterNames names;
  for (const auto& entry : runtime_->table().entries()) {
    if (entry.kind == graph::ValueKind::kParameter) {
      names.emplace(entry.tensor.unsafeGetTensorImpl(), entry.name);
    }
  }
  return names;
}

optim::OptimizerState OptimizerCore::local_state() const {
  optim::OptimizerState state = optim::get_state(optimizer_, names());
  for (auto it = state.params.begin(); it != state.params.end();) {
    it = runtime_->owns(it->first) ? std::next(it) : state.params.erase(it);
  }
  for (auto& group : state.groups) {
    const auto foreign = [&](const std::string& name) { return !runtime_->owns(name); };
    group.params.erase(std::remove_if(group.params.begin(), group.params.end(), foreign),
                       group.params.end());
  }
  return state;
}

void OptimizerCore::load(
    const std::vector<optim::OptimizerState::Group>& groups,
    std::function<std::map<std::string, optim::OptimizerState::Param>()> read) {
  const auto models = runtime_->models();
  SMP_INTERNAL_ASSERT(!models.empty(), "smp::load loads a model with the optimizer");
  set_state_({{}, groups}, names());
  const auto apply = [this, read = std::move(read)] {
    // A scheduler may have changed the options since.
    set_state_({read(), optim::get_state(optimizer_, names()).groups}, names());
  };
  if (runtime_->partitioned) {
    apply();
  } else {
    models.front()->register_post_partition_hook(apply);
  }
}

}  // namespace smp
