// SPDX-License-Identifier: Apache-2.0
#include "smp/amp.h"

#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/status.h"
#include "graph/absent.h"
#include "optim/grad_norm.h"
#include "runtime/runtime.h"
#include "runtime/step_value.h"
#include "runtime/update/complete_gradients.h"
#include "runtime/update/optimizer.h"
#include "runtime/update/unscale.h"
#include "smp/optimizer_core.h"

namespace smp::amp {
namespace {

using nlohmann::json;
using runtime::begin_use_of_gradients;
using runtime::check_gradients;
using runtime::GradientCheck;
using runtime::Runtime;
using runtime::StepValue;
using runtime::unscale_gradients;

void check_factors(const GradScalerOptions& options) {
  SMP_CHECK_WITH(UsageError, options.growth_factor() > 1,
                 "GradScaler: The growth factor must be > 1.0, got ", options.growth_factor());
  SMP_CHECK_WITH(UsageError, options.backoff_factor() < 1,
                 "GradScaler: The backoff factor must be < 1.0, got ", options.backoff_factor());
}

}  // namespace

struct GradScaler::State {
  enum class Stage { kReady, kUnscaled, kStepped };
  struct OfOptimizer {
    Stage stage = Stage::kReady;
    bool found_inf = false;
  };

  explicit State(const GradScalerOptions& given)
      : options(given),
        scale(StepValue::make(given.init_scale())),
        growth_tracker(at::full({}, 0, at::kInt)) {}

  void check_scaled(const char* call) const {
    SMP_CHECK_WITH(UsageError, scaled, "GradScaler: Attempted ", call,
                   " but _scale is None. This may indicate your script did not use "
                   "scaler.scale(loss or outputs) earlier in the iteration");
  }

  GradScalerOptions options;
  std::shared_ptr<StepValue> scale;
  at::Tensor growth_tracker;  // steps in a row without inf or NaN
  bool scaled = false;        // `scale` was called
  std::map<const void*, OfOptimizer> optimizers;
};

GradScaler::GradScaler(const GradScalerOptions& options) {
  if (options.enabled()) check_factors(options);
  state_ = std::make_shared<State>(options);
}

at::Tensor GradScaler::scale(const at::Tensor& output) const {
  if (!is_enabled()) return output;
  state_->scaled = true;
  return at::mul(output, state_->scale->tensor().to(output.device()));
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) const {
  std::vector<at::Tensor> scaled;
  for (const at::Tensor& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

GradScaler::Handle GradScaler::handle_of_distributed(const OptimizerCore& optimizer) {
  return {&optimizer.impl(), [&] { return optimizer.impl().gradients(); }};
}

GradScaler::Handle GradScaler::handle_of_plain(const torch::optim::Optimizer& optimizer) {
  return {&optimizer, [&] {
            std::vector<at::Tensor> gradients;
            for (const at::Tensor& parameter : optim::parameters_of(optimizer)) {
              const at::Tensor& gradient = parameter.grad();
              if (gradient.defined() && !graph::is_absent(gradient)) gradients.push_back(gradient);
            }
            return gradients;
          }};
}

void GradScaler::unscale(const Handle& optimizer) {
  const core::CallScope here("GradScaler::unscale_");
  begin_use_of_gradients("GradScaler: unscale_");
  if (!is_enabled()) return;
  state_->check_scaled("unscale_");
  State::OfOptimizer& own = state_->optimizers[optimizer.identity];
  SMP_CHECK_WITH(UsageError, own.stage != State::Stage::kUnscaled,
                 "GradScaler: unscale_() has already been called on this optimizer since the last "
                 "update()");
  SMP_CHECK_WITH(UsageError, own.stage != State::Stage::kStepped,
                 "GradScaler: unscale_() is being called after step()");
  const auto gradients = optimizer.gradients();
  const bool half = std::any_of(gradients.begin(), gradients.end(), [](const at::Tensor& gradient) {
    return gradient.scalar_type() == at::kHalf;
  });
  SMP_CHECK_WITH(
      UsageError, !half,
      "GradScaler: Attempting to unscale FP16 gradients. Keep parameters in float32 and "
      "compute under autocast, or set \"fp16\": true and give the optimizer a loss scale");
  const auto world = Runtime::exists() ? Runtime::get().world() : nullptr;
  const GradientCheck check = check_gradients(gradients, world.get());
  SMP_CHECK_WITH(UsageError, check.any,
                 "GradScaler: No inf checks were recorded for this optimizer: no parameter of it "
                 "has a gradient, on any rank");
  if (!check.found_inf) unscale_gradients(gradients, get_scale());
  own = {State::Stage::kUnscaled, check.found_inf};
}

bool GradScaler::begin_step(const Handle& optimizer) {
  begin_use_of_gradients("GradScaler: step");
  if (!is_enabled()) return true;
  state_->check_scaled("step");
  State::OfOptimizer& own = state_->optimizers[optimizer.identity];
  SMP_CHECK_WITH(UsageError, own.stage != State::Stage::kStepped,
                 "GradScaler: step() has already been called since the last update()");
  if (own.stage == State::Stage::kReady) unscale(optimizer);
  own.stage = State::Stage::kStepped;
  return !own.found_inf;
}

void GradScaler::update() {
  begin_use_of_gradients("GradScaler: update");
  if (!is_enabled()) return;
  state_->check_scaled("update");
  bool checked = false, found_inf = false;
  for (const auto& [identity, own] : state_->optimizers) {
    checked = checked || own.stage != State::Stage::kReady;
    found_inf = found_inf || own.found_inf;
  }
  SMP_CHECK_WITH(UsageError, checked, "GradScaler: No inf checks were recorded prior to update");
  at::Tensor scale = state_->scale->value();
  at::_amp_update_scale_(scale, state_->growth_tracker,
                         at::full({}, found_inf ? 1.0 : 0.0, at::kFloat), get_growth_factor(),
                         get_backoff_factor(), get_growth_interval());
  state_->optimizers.clear();
}

void GradScaler::update(double new_scale) {
  begin_use_of_gradients("GradScaler: update");
  if (!is_enabled()) return;
  state_->check_scaled("update");
  state_->scale->set(new_scale);
  state_->optimizers.clear();
}

double GradScaler::get_scale() const { return is_enabled() ? state_->scale->get() : 1; }
double GradScaler::get_growth_factor() const { return state_->options.growth_factor(); }
void GradScaler::set_growth_factor(double factor) { state_->options.growth_factor(factor); }
double GradScaler::get_backoff_factor() const { return state_->options.backoff_factor(); }
void GradScaler::set_backoff_factor(double factor) { state_->options.backoff_factor(factor); }
int64_t GradScaler::get_growth_interval() const { return state_->options.growth_interval(); }
void GradScaler::set_growth_interval(int64_t interval) {
  state_->options.growth_interval(interval);
}
bool GradScaler::is_enabled() const { return state_->options.enabled(); }

std::string GradScaler::state_dict() const {
  if (!is_enabled()) return "{}";
  const json state = {{"scale", get_scale()},
                      {"growth_factor", get_growth_factor()},
                      {"backoff_factor", get_backoff_factor()},
                      {"growth_interval", get_growth_interval()},
                      {"_growth_tracker", state_->growth_tracker.item<int>()}};
  return state.dump();
}

void GradScaler::load_state_dict(const std::string& text) {
  begin_use_of_gradients("GradScaler: load_state_dict");
  if (!is_enabled()) return;
  const json state = json::parse(text, nullptr, /*allow_exceptions=*/false);
  SMP_CHECK_WITH(CheckpointError, !state.empty(),
                 "GradScaler: The source state dict is empty, possibly because it was saved from a "
                 "disabled instance of GradScaler");
  try {
    GradScalerOptions options;
    options.init_scale(state.at("scale").get<double>())
        .growth_factor(state.at("growth_factor").get<double>())
        .backoff_factor(state.at("backoff_factor").get<double>())
        .growth_interval(state.at("growth_interval").get<int64_t>());
    const int tracker = state.at("_growth_tracker").get<int>();
    check_factors(options);
    state_->options = options;
    state_->scale->set(options.init_scale());
    state_->growth_tracker.fill_(tracker);
  } catch (const json::exception& error) {
    core::fail<CheckpointError>(
        "the saved state of a GradScaler is malformed: expected what state_dict() gives, got ",
        text, " (", error.what(), ")");
  }
}

}  // namespace smp::amp
