// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "dp/bucket_layout.h"
#include "dp/parameter_pieces.h"
#include "dp/step_gradients.h"
#include "smp/comm_hooks.h"

namespace smp::dp {

/// How the gradients of whole parameters are summed in a step.
struct BucketOptions : StepGradientOptions {
  /// Size of a bucket in bytes; a larger parameter has a bucket of its own.
  int64_t bucket_bytes = 25 << 20;
  /// `.grad` lies in the bucket, where it had been undefined and is of the sum's dtype.
  bool gradient_as_bucket_view = false;

  /// Whether buckets made for one serve for the other: `set_microbatches` sets the rest.
  bool same_sums(const BucketOptions& other) const;
};

/// The gradients of parameters that each replica holds whole. Without `ParameterPieces` buckets
/// have memory all the time, and all replicas get all of the sums. With them a replica gets its
/// pieces of the sums, of the same bits, as gradients of the pieces, and a bucket has memory from
/// its first gradient until it is reduced; with one microbatch, at most one is being reduced while
/// the next fills.
///
/// Those of a rank are on one device, where the sums are too, and `group` takes its tensors.
class GradientBuckets final : public WholeGradients {
 public:
  /// `names` are for errors.
  GradientBuckets(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                  comm::CommunicatorPtr group, const BucketOptions& options);
  /// For parameters that are divided among the replicas; `bucket_bytes` is theirs.
  GradientBuckets(std::shared_ptr<ParameterPieces> pieces, const BucketOptions& options);

  /// Reduces buckets by `hook`, which divides, too, over `replicas`. Before the first step; not
  /// with `ParameterPieces`, and with one gradient shard on a replica.
  void set_hook(CommHook hook, Group replicas);

  void set_microbatches(int count, double divisor) override;
  at::Tensor buffer(size_t index, int microbatch) override;

 private:
  GradientBuckets(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                  comm::CommunicatorPtr group, const BucketOptions& options, BucketLayout layout,
                  std::shared_ptr<ParameterPieces> pieces);
  void accumulate(int shard, size_t index, at::Tensor gradient, bool first,
                  core::TensorUpdates& updates) override;
  Reduced reduced(size_t index) override;
  void publish(size_t index, const at::Tensor& mean, core::TensorUpdates& updates) override;

  void allocate(int shard, size_t bucket);
  at::Tensor& claimed(int shard, size_t index);
  std::vector<at::Tensor> take_sums(size_t bucket);
  WorkPtr start(size_t bucket);
  GradBucket grad_bucket(size_t bucket) const;

  const std::vector<at::Tensor> parameters_;
  const BucketOptions options_;
  const BucketLayout layout_;
  const std::shared_ptr<ParameterPieces> pieces_;  // null: every replica gets all of the sums
  std::vector<BucketMemory> memory_;               // memory of each local shard
  CommHook hook_;                                  // null: buckets are summed
  std::optional<Group> hook_group_;
};

}  // namespace smp::dp
