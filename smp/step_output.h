// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "smp/export.h"
#include "smp/group.h"

namespace smp {

/// One tensor that a step function returned, for every microbatch. Available on every rank of the
/// pipeline that computed it, unless `StepOptions::share_outputs` says otherwise; nothing crosses
/// replicas. As documented for SMP's StepOutput. Methods that make one tensor of the outputs throw
/// `UsageError` where they are undefined.
class SMP_API StepOutput {
 public:
  StepOutput() = default;
  explicit StepOutput(std::vector<at::Tensor> outputs) : outputs_(std::move(outputs)) {}

  /// The tensors by microbatch.
  const std::vector<at::Tensor>& outputs() const { return outputs_; }

  /// The mean over microbatches: summed in microbatch order, divided once.
  [[nodiscard]] at::Tensor reduce_mean() const;
  /// The same over the microbatches of all ranks of a group, in the order of the ranks. With
  /// `CommGroup::kDp` these are the microbatches of the whole batch, so that the mean has the same
  /// bits on any number of ranks. Collective over the group; between steps.
  [[nodiscard]] at::Tensor reduce_mean(const Group& group) const;
  /// The sum over microbatches, in microbatch order. As `torch::sum`, it counts truth values and
  /// adds integers of any type in int64.
  [[nodiscard]] at::Tensor reduce_sum() const;
  /// The microbatches one after the other along the batch axis (0). Throws `UsageError` for
  /// tensors without axes; use `stack` for those.
  [[nodiscard]] at::Tensor concat() const;
  /// The microbatches along a new first axis.
  [[nodiscard]] at::Tensor stack() const;

  /// Does not compile: it would be the number of one microbatch.
  template <class T = double>
  T item() const {
    static_assert(sizeof(T*) == 0,
                  "a StepOutput has a tensor for each microbatch, so it has no item(): take the "
                  "mean or the sum of them first, as by reduce_mean().item<double>()");
    return T();
  }

 private:
  const std::vector<at::Tensor>& defined() const;

  std::vector<at::Tensor> outputs_;
};

}  // namespace smp
