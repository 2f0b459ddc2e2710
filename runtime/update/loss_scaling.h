// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>

#include "runtime/runtime.h"
#include "runtime/update/loss_scaler.h"
#include "runtime/update/optimizer_pieces.h"

namespace smp::runtime {

/// The key of an optimizer's dynamic loss scale in a checkpoint's "optimizer".
constexpr const char* kLossScale = "loss_scale";

/// Divides the gradients of an optimizer by the loss scale once before each of its steps, and has
/// it skip the step where a gradient is not finite on some rank of the world. Internal.
///
/// There is a scale where the program asks for one (`start`), and with `fp16` one of 1, so that
/// overflows are noticed there in any case. Without, nothing happens and nothing communicates.
class LossScaling {
 public:
  LossScaling(std::shared_ptr<Runtime> runtime, OptimizerPieces& pieces);

  /// From the next step on `model->backward` multiplies the loss by a scale with these options.
  /// Throws `UsageError` for options without meaning, inside a step function, and if another
  /// optimizer scales the loss.
  void start(const LossScaleOptions& options);

  /// Divides the gradients, unless that was done since the last step; returns whether all were
  /// finite, else they are as they were. Collective over the world.
  bool unscale();
  /// Whether the optimizer shall step: divides if need be, and updates the scale.
  bool begin_step(bool has_closure);
  /// The gradients were dropped.
  void forget() { unscaled_ = false; }

  /// Whether the last gradients that were looked at were not finite.
  bool overflow() const { return overflow_; }
  /// The factor of the loss.
  double loss_scale() const { return scaler_ ? scaler_->loss_scale() : 1; }

  /// Where a dynamic scale stands; the loaded state, where there is none yet; else empty.
  nlohmann::json state() const;
  /// The inverse. Without a dynamic scale the state waits for `start`, until gradients are used.
  void load_state(const nlohmann::json& state);
  /// Throws `CheckpointError` for a state that `load_state` cannot take.
  static void check_state(const nlohmann::json& state) {
    if (!state.empty()) LossScaler::check_state_dict(state);
  }

 private:
  void check_alone() const;
  bool is_dynamic() const;

  std::shared_ptr<Runtime> runtime_;
  OptimizerPieces& pieces_;
  std::shared_ptr<LossScaler> scaler_;                 // null: gradients are not looked at
  nlohmann::json waiting_ = nlohmann::json::object();  // the state that was loaded without a scale
  bool unscaled_ = false;
  int64_t unscaled_after_ = 0;  // steps of training
  bool overflow_ = false;
};

}  // namespace smp::runtime
