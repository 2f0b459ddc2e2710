#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "dp/bucket_layout.h"
#include "dp/parameter_slices.h"

namespace smp::dp {

/// How the gradients of one step are summed and averaged.
struct BucketOptions {
  /// Size of a bucket in bytes; a larger parameter has a bucket of its own.
  int64_t bucket_bytes = 25 << 20;
  /// Microbatches of this rank in a step.
  int microbatches = 1;
  /// Into how many shards the microbatches of all replicas are grouped; a multiple of the number
  /// of replicas. Sums go over the microbatches of a shard in order, then over shards in order, so
  /// that any number of replicas gives the same bits.
  int gradient_shards = 1;
  /// The reduced sum is divided once by this number.
  double divisor = 1;
  /// Reduce a bucket as soon as its parameters are complete, not when all are.
  bool overlapping = true;
  /// Reduce in every n-th step; the gradients of the others add up.
  int backward_passes = 1;
  /// `.grad` lies in the bucket, where it had been undefined and is of the sum's dtype.
  bool gradient_as_bucket_view = false;
  /// `.grad` has the dtype of the sum: float32 where parameters are of half precision.
  bool gradients_as_summed = false;

  bool operator==(const BucketOptions& other) const;
};

/// The gradients of a list of parameters during one step: accumulated raw over microbatches in
/// float32 (float64 for float64), reduced over the data-parallel group bucket by bucket, divided
/// once, and only then added to `.grad`. See docs/architecture.md, "Numerics".
///
/// With `ParameterSlices` a replica gets only its pieces of the sums, which have the same bits, as
/// gradients of the pieces.
///
/// Belongs to one thread. All ranks of the group must have the same parameters in the same order;
/// those of a rank are on one device, where the sums are too, and `group` takes its tensors.
class GradientBuckets {
 public:
  /// `names` are for errors. Throws `ConfigError` when `gradient_shards` does not fit the number
  /// of replicas and microbatches.
  GradientBuckets(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                  comm::CommunicatorPtr group, const BucketOptions& options);
  /// For parameters that are divided among the replicas; `bucket_bytes` is theirs.
  GradientBuckets(std::shared_ptr<ParameterSlices> slices, const BucketOptions& options);

  /// Adds the gradient of one microbatch for parameter `index`. Microbatches come in ascending
  /// order. Throws for sparse gradients.
  void add(size_t index, int microbatch, const at::Tensor& gradient);

  /// Where the caller adds the gradient of a microbatch itself, which counts as added then. For
  /// parameters of float32 and float64, whose sums have their dtype.
  at::Tensor buffer(size_t index, int microbatch);

  /// Says, before a step, that a parameter may get gradients in it, and later that it gets no more.
  void await(size_t index) { complete_[index] = false; }
  void complete(size_t index) { complete_[index] = true; }

  /// Starts to reduce the buckets whose parameters are complete, in ascending order up to the first
  /// that is not: replicas reduce the same ones in turn, whatever they complete first. Returns
  /// whether none is left.
  bool reduce_complete();

  /// Starts to reduce the rest; to be called when the last microbatch has been added.
  void reduce();

  /// Waits for the reduction and adds the results to `.grad`. A parameter without a gradient on
  /// any replica keeps its `.grad` as it is. Starts the next step. In a step that only adds up,
  /// this and the two before do nothing.
  void finish();

  /// Whether sums wait for a later step to be reduced.
  bool is_adding_up() const { return passes_ > 0; }

  /// Parameters by bucket, for tests and reports.
  const std::vector<std::vector<size_t>>& buckets() const { return layout_.members; }

 private:
  GradientBuckets(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                  comm::CommunicatorPtr group, const BucketOptions& options, BucketLayout layout,
                  std::shared_ptr<ParameterSlices> slices);
  void make_buffers();
  bool reduces() const { return passes_ + 1 == options_.backward_passes; }
  at::Tensor slice(const at::Tensor& buffer, size_t index) const;
  at::Tensor& begin(int shard, size_t index);
  void start(size_t bucket);
  void reduce_usage();
  void publish(size_t index);
  at::Tensor piece(const at::Tensor& part, size_t index) const;
  at::Tensor result(size_t index);
  int shard_of(int microbatch) const;
  at::Tensor gather_shards(size_t bucket) const;
  at::Tensor sum_shards_in_order(size_t bucket) const;

  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  comm::CommunicatorPtr group_;
  BucketOptions options_;
  int local_shards_;
  BucketLayout layout_;
  std::shared_ptr<ParameterSlices> slices_;       // null: every replica gets all of the sums
  std::vector<std::vector<at::Tensor>> buffers_;  // by local shard and bucket
  std::vector<std::vector<at::Tensor>> targets_;  // by local shard and parameter: its slice
  std::vector<at::Tensor> pieces_;                // by parameter: of the first shard's targets
  std::vector<std::vector<bool>> used_;           // by local shard and parameter
  std::vector<bool> complete_;                    // by parameter
  int passes_ = 0;                                // steps that have only added up
  at::Tensor any_used_;                           // per parameter, over all replicas
  std::vector<at::Tensor> sums_;  // by bucket that has started: all of it, or this replica's part
  std::vector<WorkPtr> works_;
};

}  // namespace smp::dp
