// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "smp/loss_scale_options.h"

namespace smp::testing {

/// The rule of NVIDIA's DynamicLossScaler, statement by statement: Megatron-LM at commit fb4cbdc,
/// fp16/loss_scaler.py, `update_scale`.
struct PlainScaler {
  explicit PlainScaler(const LossScaleOptions& options)
      : options(options), args(options.dynamic_loss_args()) {
    scale = options.dynamic_loss_scale() ? args.init_scale() : options.static_loss_scale();
    hysteresis = args.delayed_shift();
  }
  void update(bool overflow) {
    if (!options.dynamic_loss_scale()) return;
    if (overflow) {
      if (args.delayed_shift() == 1 || hysteresis == 1) {
        scale = std::max(scale / args.scale_factor(), args.min_scale());
      } else {
        hysteresis -= 1;
      }
      last_overflow_iteration = iteration;
    } else {
      if (args.consecutive_hysteresis()) hysteresis = args.delayed_shift();
      if ((iteration - last_overflow_iteration) % args.scale_window() == 0) {
        if (!args.consecutive_hysteresis()) hysteresis = args.delayed_shift();
        scale *= args.scale_factor();
      }
    }
    iteration += 1;
  }
  LossScaleOptions options;
  DynamicLossArgs args;
  double scale;
  int64_t hysteresis, iteration = 0, last_overflow_iteration = -1;
};

/// A scale that changes as `args` say.
inline LossScaleOptions dynamic(const DynamicLossArgs& args) {
  return LossScaleOptions().dynamic_loss_scale(true).dynamic_loss_args(args);
}

}  // namespace smp::testing
