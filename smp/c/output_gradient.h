// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

/// Gradients of a step's outputs that the program gives in numbers. Internal.
namespace smp::c {

/// Fills in the gradients of a microbatch's outputs; both are contiguous and on the CPU.
using OutputGradient = std::function<void(int microbatch, const std::vector<at::Tensor>& outputs,
                                          const std::vector<at::Tensor>& gradients)>;

/// While it lives, steps of this thread call `function` by `output_gradients`. One at a time;
/// between steps.
class OutputGradientScope {
 public:
  explicit OutputGradientScope(OutputGradient function);
  ~OutputGradientScope();
  OutputGradientScope(const OutputGradientScope&) = delete;
  OutputGradientScope& operator=(const OutputGradientScope&) = delete;

 private:
  const OutputGradient function_;
};

/// In a step function: gradients of these outputs, which need some, for `model->backward`. They are
/// computed by an operator of the step's graph, smp::output_gradients, once for each microbatch on
/// the stage that it is put on, with the outputs. Where the step is captured and measured, nothing
/// is asked and they are zeros.
std::vector<at::Tensor> output_gradients(const std::vector<at::Tensor>& outputs);

}  // namespace smp::c
