// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/loss_scaler.h"

#include <ATen/ops/mul.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "core/check.h"

namespace smp::runtime {
namespace {

using nlohmann::json;

void check(bool ok, const char* name, double got, const char* expected) {
  SMP_CHECK_WITH(UsageError, ok, "the options of a loss scale are wrong: ", name, " must be ",
                 expected, ", got ", got);
}

LossScaleOptions checked(const LossScaleOptions& options) {
  const auto positive = [](double value) { return std::isfinite(value) && value > 0; };
  const DynamicLossArgs& args = options.dynamic_loss_args();
  check(positive(options.static_loss_scale()), "static_loss_scale", options.static_loss_scale(),
        "a positive number");
  check(positive(args.init_scale()), "init_scale", args.init_scale(), "a positive number");
  check(args.scale_factor() > 1, "scale_factor", args.scale_factor(), "above 1");
  check(args.scale_window() > 0, "scale_window", static_cast<double>(args.scale_window()),
        "a positive integer");
  check(args.min_scale() >= 0, "min_scale", args.min_scale(), "0 or more");
  check(args.delayed_shift() > 0, "delayed_shift", static_cast<double>(args.delayed_shift()),
        "a positive integer");
  return options;
}

double first_scale(const LossScaleOptions& options) {
  return options.dynamic_loss_scale() ? options.dynamic_loss_args().init_scale()
                                      : options.static_loss_scale();
}

/// A saved scale: `static_loss_scale` of the options is where it stands.
struct Saved {
  LossScaleOptions options;
  int64_t iteration, last_overflow, hysteresis;
};

Saved parse(const json& state) {
  const json& args = state.at("dynamic_loss_args");
  LossScaleOptions options;
  options.static_loss_scale(state.at("loss_scale").get<double>())
      .dynamic_loss_scale(state.at("dynamic_loss_scale").get<bool>())
      .dynamic_loss_args(
          DynamicLossArgs()
              .init_scale(args.at("init_scale").get<double>())
              .scale_factor(args.at("scale_factor").get<double>())
              .scale_window(args.at("scale_window").get<int64_t>())
              .min_scale(args.at("min_scale").get<double>())
              .delayed_shift(args.at("delayed_shift").get<int64_t>())
              .consecutive_hysteresis(args.at("consecutive_hysteresis").get<bool>()));
  return {checked(options), state.at("iteration").get<int64_t>(),
          state.at("last_overflow_iteration").get<int64_t>(),
          state.at("hysteresis").get<int64_t>()};
}

Saved read(const json& state) {
  std::string problem;
  try {
    return parse(state);
  } catch (const json::exception& error) {
    problem = c10::str(state.dump(), " (", error.what(), ")");
  } catch (const UsageError& error) {
    problem = core::text_without_prefix(error);
  }
  core::fail<CheckpointError>(
      "the saved loss scale is malformed: expected what LossScaler::state_dict() gives, got ",
      problem);
}

}  // namespace

LossScaler::LossScaler(const LossScaleOptions& options)
    : options_(checked(options)),
      scale_(StepValue::make(first_scale(options))),
      hysteresis_(options.dynamic_loss_args().delayed_shift()) {}

std::vector<at::Tensor> LossScaler::scale(const std::vector<at::Tensor>& tensors,
                                          bool to_float) const {
  const at::Tensor scale = scale_->tensor();
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(at::mul(to_float ? tensor.to(at::kFloat) : tensor, scale));
  }
  return result;
}

void LossScaler::update(bool overflow) {
  if (!options_.dynamic_loss_scale()) return;
  const DynamicLossArgs& args = options_.dynamic_loss_args();
  if (overflow) {
    if (hysteresis_ == 1) {
      scale_->set(std::max(loss_scale() / args.scale_factor(), args.min_scale()));
    } else {
      --hysteresis_;
    }
    last_overflow_ = iteration_;
  } else {
    const bool grows = (iteration_ - last_overflow_) % args.scale_window() == 0;
    if (args.consecutive_hysteresis() || grows) hysteresis_ = args.delayed_shift();
    const double larger = loss_scale() * args.scale_factor();
    if (grows && std::isfinite(static_cast<float>(larger))) scale_->set(larger);
  }
  ++iteration_;
}

json LossScaler::state_dict() const {
  const DynamicLossArgs& args = options_.dynamic_loss_args();
  return {{"loss_scale", loss_scale()},
          {"dynamic_loss_scale", options_.dynamic_loss_scale()},
          {"dynamic_loss_args",
           {{"init_scale", args.init_scale()},
            {"scale_factor", args.scale_factor()},
            {"scale_window", args.scale_window()},
            {"min_scale", args.min_scale()},
            {"delayed_shift", args.delayed_shift()},
            {"consecutive_hysteresis", args.consecutive_hysteresis()}}},
          {"iteration", iteration_},
          {"last_overflow_iteration", last_overflow_},
          {"hysteresis", hysteresis_}};
}

void LossScaler::load_state_dict(const json& state) {
  const Saved saved = read(state);
  options_ = saved.options;
  iteration_ = saved.iteration;
  last_overflow_ = saved.last_overflow;
  hysteresis_ = saved.hysteresis;
  scale_->set(saved.options.static_loss_scale());
}

void LossScaler::check_state_dict(const json& state) { read(state); }

}  // namespace smp::runtime
