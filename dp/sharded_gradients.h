#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "dp/sharded_parameters.h"

namespace smp::dp {

/// How the gradients of sharded parameters are summed in a step.
struct ShardedGradientOptions {
  /// Elements of a bucket; a larger gradient has one of its own.
  int64_t bucket_elements = 500000000;
  int microbatches = 1;     ///< of this rank in a step
  int gradient_shards = 1;  ///< as in `BucketOptions`
  double divisor = 1;       ///< the reduced sum is divided once by this number
  int backward_passes = 1;  ///< reduce in every n-th step; the gradients of the others add up
  bool gradients_as_summed = false;  ///< as in `BucketOptions`
};

/// The gradients of sharded parameters during one step: summed raw over microbatches, then over all
/// replicas in rank order, divided once, and added to the `.grad` of this rank's shards. The same
/// bits as `GradientBuckets`.
///
/// A bucket has memory from its first gradient until it is reduced, which begins as soon as all its
/// gradients of the last microbatch are there and those of the buckets before it; at most one is
/// being reduced while the next fills. So with one microbatch whole gradients live briefly. Each
/// rank of all replicas reduces a piece of each gradient, and those that have the same shard then
/// exchange their pieces of it.
///
/// Belongs to one thread at a time. All ranks have the same parameters, options and order.
class ShardedGradients {
 public:
  /// `order`: indices in `parameters`, as their gradients become ready. `replicas` has all ranks,
  /// in groups of consecutive ones that are `parameters->group()`; `twins` those with the same
  /// shard. Throws `ConfigError` when `gradient_shards` does not fit.
  ShardedGradients(std::shared_ptr<ShardedParameters> parameters, const std::vector<size_t>& order,
                   comm::CommunicatorPtr replicas, comm::CommunicatorPtr twins,
                   const ShardedGradientOptions& options);

  /// Adds the gradient of one microbatch for a parameter. Microbatches come in ascending order.
  /// Throws `UsageError` for a sparse gradient.
  void add(size_t parameter, int microbatch, const at::Tensor& gradient);

  /// Starts to reduce the rest; to be called when the last microbatch is through.
  void reduce();

  /// Waits for the reductions and adds the results to the shards' `.grad`. A parameter that no
  /// replica has given a gradient keeps its `.grad`. In a step that only adds up, this and `reduce`
  /// do nothing.
  void finish();

  /// Whether sums wait for a later step to be reduced.
  bool is_adding_up() const { return passes_ > 0; }

  /// Parameters by bucket; for tests and reports.
  std::vector<std::vector<size_t>> buckets() const;

 private:
  struct Slot {
    size_t bucket;
    int64_t offset;  // in each rank's row of the bucket
    int64_t piece;   // elements that a rank reduces
  };
  struct Bucket {
    std::vector<size_t> members;
    at::TensorOptions options;
    int64_t elements = 0;
    int64_t width = 0;   // of a row: a piece of each member
    size_t missing = 0;  // members without a gradient of the last microbatch
    at::Tensor sums;     // by rank that reduces it, local shard and place in the row
    at::Tensor received;
    at::Tensor reduced;  // by twin and place in the row
    WorkPtr work;
  };

  void fill_buckets(const std::vector<size_t>& order);
  bool reduces() const { return passes_ + 1 == options_.backward_passes; }
  void start_complete();
  void start(size_t index);
  void settle(size_t index);
  void reduce_usage();
  void publish(size_t bucket);
  template <class Call>
  void name_in_errors(size_t bucket, const Call& call) const;

  std::shared_ptr<ShardedParameters> parameters_;
  comm::CommunicatorPtr replicas_;
  comm::CommunicatorPtr twins_;
  ShardedGradientOptions options_;
  int local_shards_;
  std::vector<Bucket> buckets_;
  std::vector<Slot> slots_;              // by parameter; of those that are in a bucket
  std::vector<std::vector<bool>> used_;  // by local shard and parameter
  size_t next_ = 0;                      // bucket that is reduced next
  int passes_ = 0;                       // steps that have only added up
  at::Tensor any_used_;                  // per parameter, over all replicas
};

}  // namespace smp::dp
