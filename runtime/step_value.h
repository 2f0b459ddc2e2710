// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "runtime/run_state.h"
#include "smp/detail/step_call.h"

namespace smp::runtime {

/// A number that may change between steps, such as a loss scale, as an input of every step
/// function: another value is neither another graph nor a patch of one, and is used whatever the
/// configuration's `guard` says. Ranks of a pipeline must have the same value. Internal.
class StepValue {
 public:
  /// Made on this rank's thread; steps that begin later have it. Without `init` it is a plain
  /// number.
  static std::shared_ptr<StepValue> make(double value);

  /// The number, a tensor of float32 without dimensions on the CPU.
  const at::Tensor& value() const { return value_; }
  double get() const;
  void set(double value);

  /// The tensor to compute with: inside a step function its input, elsewhere `value`. Throws
  /// `UsageError` inside a step that began without it.
  at::Tensor tensor() const;

 private:
  friend detail::StepCall with_step_values(const StepInputs& inputs, at::Device device,
                                           const detail::StepCall& call);
  explicit StepValue(double value);

  at::Tensor value_;
  at::Tensor placeholder_;  // while a step function runs
};

/// The call with all values of `inputs` as further inputs, which every microbatch gets whole. On
/// the device of the models.
detail::StepCall with_step_values(const StepInputs& inputs, at::Device device,
                                  const detail::StepCall& call);

}  // namespace smp::runtime
