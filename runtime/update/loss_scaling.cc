// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/loss_scaling.h"

#include <utility>

#include "core/check.h"
#include "runtime/update/unscale.h"

namespace smp::runtime {

LossScaling::LossScaling(std::shared_ptr<Runtime> runtime, OptimizerPieces& pieces)
    : runtime_(std::move(runtime)), pieces_(pieces) {
  if (runtime_->config().fp16()) scaler_ = std::make_shared<LossScaler>(LossScaleOptions());
}

/// A loss has one scale.
void LossScaling::check_alone() const {
  const auto scaler = runtime_->step_inputs.loss_scaler.lock();
  SMP_CHECK_WITH(UsageError, scaler == nullptr || scaler == scaler_,
                 "the loss is multiplied by the loss scale of another DistributedOptimizer, which "
                 "alone can divide gradients by it. For several optimizers use "
                 "smp::amp::GradScaler");
}

void LossScaling::start(const LossScaleOptions& options) {
  SMP_CHECK_WITH(UsageError, !runtime_->current_step.is_running,
                 "optimizer.scale_loss() was called inside a step function; call it before the "
                 "first step");
  check_alone();
  scaler_ = std::make_shared<LossScaler>(options);
  runtime_->step_inputs.loss_scaler = scaler_;
  if (is_dynamic()) load_state(waiting_);
}

bool LossScaling::unscale() {
  check_alone();
  waiting_ = nlohmann::json::object();
  if (scaler_ == nullptr) return true;
  SMP_CHECK_WITH(UsageError, !unscaled_ || unscaled_after_ == runtime_->progress.training_steps,
                 "clip_master_grads() has divided the gradients by the loss scale, and a step has "
                 "added gradients that are not divided. Call optimizer.step() or "
                 "optimizer.zero_grad() before the next step (not that of torch::optim::Optimizer, "
                 "which knows no scale)");
  if (unscaled_) return !overflow_;
  const auto gradients = pieces_.gradients();
  overflow_ = check_gradients(gradients, runtime_->world().get()).found_inf;
  if (!overflow_ && loss_scale() != 1) unscale_gradients(gradients, loss_scale());
  unscaled_ = true;
  unscaled_after_ = runtime_->progress.training_steps;
  return !overflow_;
}

bool LossScaling::begin_step(bool has_closure) {
  if (scaler_ == nullptr) return unscale();
  SMP_CHECK_WITH(UsageError, !has_closure,
                 "optimizer.step(closure) cannot be combined with loss scaling or \"fp16\": a step "
                 "whose gradients overflow is skipped, which a closure is not told. Call the step "
                 "function first, then optimizer.step()");
  const bool finite = unscale();
  scaler_->update(!finite);
  unscaled_ = false;
  return finite;
}

bool LossScaling::is_dynamic() const {
  return scaler_ != nullptr && scaler_->options().dynamic_loss_scale();
}

nlohmann::json LossScaling::state() const {
  return is_dynamic() ? scaler_->state_dict() : waiting_;
}

void LossScaling::load_state(const nlohmann::json& state) {
  if (is_dynamic() && !state.empty()) scaler_->load_state_dict(state);
  waiting_ = is_dynamic() ? nlohmann::json::object() : state;
}

}  // namespace smp::runtime
