// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <cstdint>

#include "smp/group.h"

namespace smp {

/// Options of `DistributedDataParallel`; names and defaults are those of PyTorch's class, except
/// where it says so.
struct DDPOptions {
  /// The replicas; at first all ranks of the program, after `smp::init`.
  TORCH_ARG(Group, process_group) = CommGroup::kWorld;
  /// Give buffers the values of the first replica before each forward pass of training that is to
  /// be reduced. Never in evaluation, unlike PyTorch.
  TORCH_ARG(bool, broadcast_buffers) = true;
  /// Give all replicas the parameters and buffers of the first in the constructor.
  TORCH_ARG(bool, init_sync) = true;
  /// Size of a bucket of gradients in MiB.
  TORCH_ARG(double, bucket_cap_mb) = 25;
  /// Size of the first bucket in MiB.
  TORCH_ARG(double, first_bucket_cap_mb) = 1;
  /// Backward passes may leave out parameters, other ones on each rank.
  TORCH_ARG(bool, find_unused_parameters) = false;
  /// `.grad` lies in the buckets, which saves memory and a copy; PyTorch's default is false.
  TORCH_ARG(bool, gradient_as_bucket_view) = true;
  /// Every backward pass takes the same way, which may be re-entrant and leave out parameters.
  TORCH_ARG(bool, static_graph) = false;
  /// Reduce in every n-th backward pass only; gradients of the others add up. PyTorch has only
  /// `no_sync`.
  TORCH_ARG(int64_t, backward_passes_per_step) = 1;
};

/// Options of `DistributedDataParallel::join`, with the names and defaults of PyTorch's.
struct JoinOptions {
  /// Divide by the number of replicas even when some have no data any more, so that every sample
  /// counts alike; else by the number of those that have.
  TORCH_ARG(bool, divide_by_initial_world_size) = true;
  /// False: do nothing.
  TORCH_ARG(bool, enable) = true;
  /// End training on all replicas, by an error, when the first has no data any more.
  TORCH_ARG(bool, throw_on_early_termination) = false;
};

}  // namespace smp
