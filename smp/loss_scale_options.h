// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <cstdint>

namespace smp {

/// How a dynamic loss scale changes: SMP's `dynamic_loss_args`, with its names and defaults.
struct DynamicLossArgs {
  /// The scale of the first step.
  TORCH_ARG(double, init_scale) = 4294967296.0;
  /// Factor by which the scale grows, and by which it is divided after an overflow.
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

/// The scale by which a `DistributedOptimizer` multiplies the loss: SMP's arguments of that name.
struct LossScaleOptions {
  /// The scale, if it is not dynamic.
  TORCH_ARG(double, static_loss_scale) = 1;
  /// Whether the scale is divided after an overflow and grows when there was none for long.
  TORCH_ARG(bool, dynamic_loss_scale) = false;
  TORCH_ARG(DynamicLossArgs, dynamic_loss_args);
};

}  // namespace smp
