// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/tensor_lists.h"
#include "dp/bucket_queue.h"

namespace smp::dp {

/// How the gradients of one step are summed and averaged.
struct StepGradientOptions {
  /// Microbatches of this rank in a step.
  int microbatches = 1;
  /// Into how many shards the microbatches of all replicas are grouped; a multiple of the number
  /// of replicas. Sums go over the microbatches of a shard in order, then over shards in order, so
  /// that any number of replicas gives the same bits.
  int gradient_shards = 1;
  /// The reduced sum is divided once by this number.
  double divisor = 1;
  /// Reduce in every n-th step; the gradients of the others add up.
  int backward_passes = 1;
  /// `.grad` has the dtype of the sum: float32 where parameters are of half precision.
  bool gradients_as_summed = false;
  /// Reduce a bucket as soon as its parameters are complete, not when all are.
  bool overlapping = true;
};

/// The reduction of a bucket begins, or has ended.
struct ReductionEvent {
  size_t bucket = 0;
  int64_t bytes = 0;  ///< bytes of the replica's sums
  bool has_ended = false;
};

/// Is told of reductions, on the thread that communicates.
using ReductionObserver = std::function<void(const ReductionEvent&)>;

/// The gradients of a list of parameters during one step: summed raw over microbatches, in float32
/// where parameters are of half precision, then over the replicas bucket by bucket, divided once,
/// and only then added to `.grad`. See docs/architecture.md, "Numerics". Where sums lie and how a
/// bucket is reduced is for derived classes to say.
///
/// Belongs to one thread at a time. All replicas have the same parameters in the same order.
class StepGradients {
 public:
  virtual ~StepGradients() = default;
  StepGradients(const StepGradients&) = delete;
  StepGradients& operator=(const StepGradients&) = delete;

  /// Adds the gradient of one microbatch for parameter `index`, whose memory may become the sum's
  /// if the caller gives it away. Microbatches come in ascending order. Throws `UsageError` for a
  /// sparse gradient.
  void add(size_t index, int microbatch, at::Tensor gradient);
  /// The same for several parameters, each once, in few kernels on a device. The memory of the
  /// gradients stays the caller's.
  struct Given {
    size_t index;
    at::Tensor gradient;
  };
  void add(int microbatch, const std::vector<Given>& gradients);

  /// Says, before a step, that a parameter may get gradients in it, and later that it gets no more.
  void await(size_t index) { queue_.await(index); }
  void complete(size_t index) { queue_.mark_ready(index); }

  /// Starts to reduce the buckets whose parameters are complete, in ascending order up to the first
  /// that is not; does not wait for them. Returns whether none is left.
  bool start_complete();

  /// Sets the observer from the next bucket on; null: none.
  void observe(ReductionObserver observer) { observer_ = std::move(observer); }

  /// Starts to reduce the rest; to be called when the last microbatch has been added.
  void reduce();

  /// Waits for the reduction and adds the results to `.grad`. A parameter without a gradient on
  /// any replica keeps its `.grad` as it is. Starts the next step. In a step that only adds up,
  /// this and `reduce` do nothing.
  void finish();

  /// Sums this many microbatches of this rank from now on and divides by `divisor`. Other numbers
  /// come only where no sums wait for a later step. Throws as the constructor does.
  virtual void set_microbatches(int count, double divisor);
  /// Divides as if there were this many replicas from now on; at first there are all.
  void set_counted_replicas(int count);

  /// Whether sums wait for a later step to be reduced.
  bool is_adding_up() const { return passes_ > 0; }

  /// Parameters by bucket, for tests and reports.
  const std::vector<std::vector<size_t>>& buckets() const { return queue_.members(); }

 protected:
  /// `members`: parameters by bucket. `names`, of all parameters, are for errors. Throws
  /// `ConfigError` when `gradient_shards` does not fit the number of replicas and microbatches.
  StepGradients(std::vector<std::vector<size_t>> members, std::vector<std::string> names,
                comm::CommunicatorPtr replicas, const StepGradientOptions& options,
                BucketQueue::Policy policy);

  /// Has `updates` add a gradient to its parameter's sum in a shard of this replica's, or begins
  /// that with it.
  virtual void accumulate(int shard, size_t index, at::Tensor gradient, bool first,
                          core::TensorUpdates& updates) = 0;
  /// The reduced sum of a parameter, whose memory its mean may get if that `overwrites` it.
  struct Reduced {
    at::Tensor sum;
    at::ScalarType parameter;
    bool overwrites;
  };
  /// Gives the reduced sum of a parameter, or this replica's share of it.
  virtual Reduced reduced(size_t index) = 0;
  /// Adds the mean of that to `.grad`, or has `updates` do it.
  virtual void publish(size_t index, const at::Tensor& mean, core::TensorUpdates& updates) = 0;

  /// Whether this step reduces, not only adds up.
  bool reduces() const { return passes_ + 1 == options_.backward_passes; }
  int shard_of(int microbatch) const { return microbatch / (options_.microbatches / shards_); }
  /// Starts the reduction of a bucket; its `sums` live until it has ended.
  WorkPtr launch(size_t bucket, std::vector<at::Tensor> sums, comm::CollectiveTask task);
  /// Shards of this replica.
  int shards() const { return shards_; }
  /// The divisor of sums.
  double divisor() const { return options_.divisor * counted_replicas_ / replicas_->size(); }
  /// Says that reduced sums are divided already.
  void set_reduces_to_means() { reduces_to_means_ = true; }
  /// Says that a shard has a sum of a parameter. Returns whether that is new.
  bool begin(int shard, size_t index);
  bool has_sum(int shard, size_t index) const { return used_[shard][index]; }

  const comm::CommunicatorPtr replicas_;
  BucketQueue queue_;
  std::vector<at::Tensor> sums_;  // reduced sums of each bucket, until published

 private:
  void finish_reduction();
  /// Reduced sums divided, in the dtype of each parameter's `.grad`, in few kernels on a device.
  /// Frees sums as it goes.
  std::vector<at::Tensor> means(std::vector<Reduced> sums);
  void accumulate(size_t index, int microbatch, at::Tensor gradient, core::TensorUpdates& updates);
  /// `divisor()` in a sum's type.
  const at::Tensor& divisor_of(const at::Tensor& sum);

  StepGradientOptions options_;
  const int shards_;
  int counted_replicas_;
  std::map<at::ScalarType, at::Tensor> divisors_;  // made once, since a number becomes a tensor in
                                                   // each division
  std::vector<std::vector<bool>> used_;            // use by local shard and parameter
  int passes_ = 0;                                 // steps that have only added up
  bool reduces_to_means_ = false;
  ReductionObserver observer_;
};

/// Gradients of parameters that a replica holds whole.
class WholeGradients : public StepGradients {
 public:
  /// Where the caller adds the gradient of a microbatch itself, which counts as added then. For
  /// parameters of float32 and float64, whose sums have their dtype.
  virtual at::Tensor buffer(size_t index, int microbatch) = 0;

 protected:
  using StepGradients::StepGradients;
};

/// Has `updates` add a gradient to a parameter's `.grad`, or makes it that if there is none.
void add_to_grad(const at::Tensor& parameter, const at::Tensor& gradient,
                 core::TensorUpdates& updates);

/// Adds the rows of a tensor to the first, in order. Returns that.
at::Tensor sum_in_order(const at::Tensor& rows);

}  // namespace smp::dp
