// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/sharding.h"
#include "dp/bucket_layout.h"
#include "dp/sharded_parameters.h"
#include "dp/step_gradients.h"

namespace smp::dp {

/// How the gradients of sharded parameters are summed in a step.
struct ShardedGradientOptions : StepGradientOptions {
  /// Elements of a bucket; a larger gradient has one of its own.
  int64_t bucket_elements = 500000000;
};

/// The gradients of sharded parameters, which are added to the `.grad` of this rank's shards. The
/// same bits as `GradientBuckets`.
///
/// A bucket has memory from its first gradient until it is reduced; at most one is being reduced
/// while the next fills. So with one microbatch whole gradients live briefly. Each
/// rank of all replicas reduces a piece of each gradient, and those that have the same shard then
/// exchange their pieces of it.
class ShardedGradients final : public StepGradients {
 public:
  /// `order`: indices in `parameters`, as their gradients become ready. `replicas` has all ranks,
  /// in groups of consecutive ones that are `parameters->group()`; `replication_group` those with
  /// the same shard.
  ShardedGradients(std::shared_ptr<ShardedParameters> parameters, const std::vector<size_t>& order,
                   comm::CommunicatorPtr replicas, comm::CommunicatorPtr replication_group,
                   const ShardedGradientOptions& options);

 private:
  void accumulate(int shard, size_t index, at::Tensor gradient, bool first,
                  core::TensorUpdates& updates) override;
  Reduced reduced(size_t index) override;
  void publish(size_t index, const at::Tensor& mean, core::TensorUpdates& updates) override;

  comm::Range range(size_t index) const;
  at::Tensor& sums(size_t bucket);
  WorkPtr start(size_t bucket);

  const std::shared_ptr<ShardedParameters> parameters_;
  const comm::CommunicatorPtr replication_group_;
  BucketLayout layout_;  // layout of a row of a bucket's sums, which one rank reduces
  // The sums of each bucket: by rank that reduces it (its place in the replication group, and among
  // the ranks that divide parameters), local shard and place in a row.
  std::vector<at::Tensor> memory_;
};

}  // namespace smp::dp
