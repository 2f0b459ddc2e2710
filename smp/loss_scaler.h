#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "runtime/step/step_value.h"

namespace smp {

/// How a dynamic loss scale changes: SMP's `dynamic_loss_args`, with its names and defaults.
struct DynamicLossArgs {
  /// The scale of the first step.
  TORCH_ARG(double, init_scale) = 4294967296.0;
  /// By what the scale is multiplied when it grows and divided after an overflow.
  TORCH_ARG(double, scale_factor) = 2;
  /// After how many steps without an overflow the scale grows.
  TORCH_ARG(int64_t, scale_window) = 1000;
  /// The scale is never less.
  TORCH_ARG(double, min_scale) = 1;
  /// How many overflows it takes until the scale is divided.
  TORCH_ARG(int64_t, delayed_shift) = 1;
  /// Whether these have to follow each other: a step without an overflow starts the count anew.
  /// Otherwise that happens when the scale grows.
  TORCH_ARG(bool, consecutive_hysteresis) = false;
};

/// By what a `DistributedOptimizer` has the loss multiplied: SMP's arguments of that name.
struct LossScaleOptions {
  /// The scale, if it is not dynamic.
  TORCH_ARG(double, static_loss_scale) = 1;
  /// Whether the scale is divided after an overflow and grows when there was none for long.
  TORCH_ARG(bool, dynamic_loss_scale) = false;
  TORCH_ARG(DynamicLossArgs, dynamic_loss_args);
};

/// The loss scale of a `DistributedOptimizer`, by the rule of `DynamicLossScaler.update_scale`,
/// which SMP took from NVIDIA: https://github.com/NVIDIA/Megatron-LM, fp16/loss_scaler.py at commit
/// fb4cbdc (names, defaults and rule compared with that source). Once the count of overflows has
/// come to its end every further one divides the scale, until the count begins anew. In addition, a
/// scale that float32 cannot hold is not grown to.
class LossScaler {
 public:
  /// Throws `UsageError` for options without meaning.
  explicit LossScaler(const LossScaleOptions& options);

  double loss_scale() const { return scale_->get(); }
  const LossScaleOptions& options() const { return options_; }

  /// The tensors times the scale, inside a step function: in float32 where `to_float`.
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& tensors, bool to_float) const;

  /// What follows from a step that overflowed, or did not.
  void update(bool overflow);

  /// The options and where the scale stands, and back. Throws `CheckpointError` for JSON of another
  /// form.
  nlohmann::json state_dict() const;
  void load_state_dict(const nlohmann::json& state);

 private:
  LossScaleOptions options_;
  std::shared_ptr<StepValue> scale_;
  int64_t iteration_ = 0;
  int64_t last_overflow_ = -1;  // iteration
  int64_t hysteresis_;          // overflows left until the scale is divided
};

}  // namespace smp
