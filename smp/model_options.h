// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <string>

namespace smp {

/// Options of a `DistributedModel`.
struct ModelOptions {
  /// Put before the names of its parameters and buffers, with a dot. Needed only when two models
  /// of a program would use the same names.
  TORCH_ARG(std::string, name) = "";
  /// Divide gradients by the number of microbatches (as well as by the number of replicas).
  TORCH_ARG(bool, average_grads_across_microbatches) = true;
  /// Size of a gradient bucket in MiB; 0: the configuration's `bucket_cap_mb`.
  TORCH_ARG(double, bucket_cap_mb) = 0;
  /// Reduce a bucket over the replicas as soon as the stages of this rank that make its gradients
  /// are done, not when all are.
  TORCH_ARG(bool, overlapping_allreduce) = true;
  /// Reduce in every n-th step that trains; the gradients of the others add up and do not reach
  /// `.grad` before, so `zero_grad` does not drop them. All n run the same operators.
  TORCH_ARG(int64_t, backward_passes_per_step) = 1;
  /// Give the first replica's buffers to all before each step that trains.
  TORCH_ARG(bool, broadcast_buffers) = false;
  /// `.grad` lies in the bucket where it can, which saves the memory of a copy.
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
};

}  // namespace smp
