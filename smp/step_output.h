#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp {

/// One tensor that a step function returned, for every microbatch. Available on every rank of
/// the pipeline that computed it; nothing crosses replicas. As documented for SMP's StepOutput.
class StepOutput {
 public:
  StepOutput() = default;
  explicit StepOutput(std::vector<at::Tensor> outputs) : outputs_(std::move(outputs)) {}

  /// The tensors by microbatch.
  const std::vector<at::Tensor>& outputs() const { return outputs_; }

  /// The mean over microbatches: summed in microbatch order, divided once.
  at::Tensor reduce_mean() const;
  /// The sum over microbatches, in microbatch order.
  at::Tensor reduce_sum() const;
  /// The microbatches one after the other along the batch axis (0). Throws `UsageError` for
  /// tensors without axes; use `stack` for those.
  at::Tensor concat() const;
  /// The microbatches along a new first axis.
  at::Tensor stack() const;

 private:
  std::vector<at::Tensor> outputs_;
};

}  // namespace smp
