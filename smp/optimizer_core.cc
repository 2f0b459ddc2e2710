// SPDX-License-Identifier: Apache-2.0
#include "smp/optimizer_core.h"

#include <nlohmann/json.hpp>

#include "core/status.h"
#include "runtime/runtime.h"
#include "runtime/update/optimizer.h"
#include "smp/detail/optimizer_state_size.h"

namespace smp {

OptimizerCore::OptimizerCore(torch::optim::Optimizer& optimizer, StateFactory state_factory,
                             const optim::detail::Traits& traits)
    : optimizer_(std::make_shared<runtime::Optimizer>(optimizer, state_factory,
                                                      optim::detail::state_tensors, traits)) {
  runtime::Runtime::get().optimizers.add(optimizer_);
}

at::Tensor OptimizerCore::step(const std::function<at::Tensor(LossClosure)>& update,
                               const LossClosure& closure) const {
  const core::CallScope here("optimizer.step", "smp::optimizer.step");
  return optimizer_->step(update, closure);
}

void OptimizerCore::zero_grad(bool set_to_none) const { optimizer_->zero_grad(set_to_none); }

OptimizerState OptimizerCore::state_dict() const {
  const core::CallScope here("optimizer.state_dict", "smp::optimizer.state_dict");
  return optimizer_->state_dict();
}
OptimizerState OptimizerCore::local_state_dict(bool gather_if_shard) const {
  const core::CallScope here("optimizer.local_state_dict", "smp::local_state_dict");
  return optimizer_->local_state_dict(gather_if_shard);
}
void OptimizerCore::load_state_dict(const OptimizerState& state) const {
  const core::CallScope here("optimizer.load_state_dict", "smp::load_state_dict");
  optimizer_->load_state_dict(state);
}

void OptimizerCore::scale_loss(const LossScaleOptions& options) const {
  optimizer_->loss_scaling().start(options);
}
bool OptimizerCore::overflow() const { return optimizer_->loss_scaling().overflow(); }
double OptimizerCore::loss_scale() const { return optimizer_->loss_scaling().loss_scale(); }
double OptimizerCore::clip_master_grads(double max_norm, double norm_type) const {
  const core::CallScope here("optimizer.clip_master_grads", "smp::clip_master_grads");
  return optimizer_->clip_master_grads(max_norm, norm_type);
}
void OptimizerCore::reload_model_params() const { optimizer_->reload_model_params(); }

std::string OptimizerCore::loss_scaler_state() const {
  return optimizer_->loss_scaling().state().dump();
}
void OptimizerCore::load_loss_scaler_state(const std::string& state) const {
  optimizer_->loss_scaling().load_state(
      nlohmann::json::parse(state, nullptr, /*allow_exceptions=*/false));
}

}  // namespace smp
