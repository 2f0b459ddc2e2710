// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "comm/communicator.h"
#include "dp/step_gradients.h"

namespace smp::dp {

/// The gradients of a pipeline that has no replicas: no other rank has a part in the sums, so they
/// have no bucket. As in an ordinary backward pass, a parameter's first gradient becomes its sum,
/// if nothing else has that memory, and the divided sum becomes `.grad`, if there is none. The same
/// bits as `GradientBuckets`.
class LocalGradients final : public WholeGradients {
 public:
  /// `names` are for errors; `rank_alone` has one rank.
  LocalGradients(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                 comm::CommunicatorPtr rank_alone, const StepGradientOptions& options);

  at::Tensor buffer(size_t index, int microbatch) override;

 private:
  void accumulate(int shard, size_t index, at::Tensor gradient, bool first,
                  core::TensorUpdates& updates) override;
  Reduced reduced(size_t index) override;
  void publish(size_t index, const at::Tensor& mean, core::TensorUpdates& updates) override;

  void add_shards(size_t index, int end);
  at::Tensor& sum_of(int shard, size_t index);

  const std::vector<at::Tensor> parameters_;
  std::vector<std::vector<at::Tensor>> shard_sums_;  // sums by local shard and parameter
};

}  // namespace smp::dp
