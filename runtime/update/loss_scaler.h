// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "runtime/step_value.h"
#include "smp/loss_scale_options.h"

namespace smp::runtime {

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

  /// Adapts the scale after a step that overflowed, or did not.
  void update(bool overflow);

  /// The options and where the scale stands, and back. Throws `CheckpointError` for JSON of another
  /// form, and then nothing has changed.
  nlohmann::json state_dict() const;
  void load_state_dict(const nlohmann::json& state);
  /// Throws the errors of `load_state_dict`.
  static void check_state_dict(const nlohmann::json& state);

 private:
  LossScaleOptions options_;
  std::shared_ptr<StepValue> scale_;
  int64_t iteration_ = 0;
  int64_t last_overflow_ = -1;  // iteration
  int64_t hysteresis_;          // overflows left until the scale is divided
};

}  // namespace smp::runtime
