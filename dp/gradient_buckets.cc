// SPDX-License-Identifier: Apache-2.0
#include "dp/gradient_buckets.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <tuple>
#include <utility>

#include "core/check.h"

namespace smp::dp {
namespace {

/// Shards that the replicas add up together are divided among them.
BucketSizes sizes_of(const BucketOptions& options, int replicas) {
  const bool divided = options.gradient_shards > replicas;
  return {options.bucket_bytes, options.bucket_bytes, divided ? replicas : 1};
}

/// A step of one microbatch needs memory for the buckets that have gradients and are not reduced;
/// one of several has memory for all by then.
size_t most_under_way(int microbatches, bool divided) {
  return divided && microbatches == 1 ? 1 : std::numeric_limits<size_t>::max();
}

/// Adds up all shards of all replicas, in order; of `shards`, a replica's sums of one bucket, which
/// may be overwritten. `sum` gets this replica's part.
void add_shards(comm::TaskCollectives& group, int replicas, const std::vector<at::Tensor>& shards,
                const at::Tensor& sum) {
  std::vector<at::Tensor> received;  // tensors by shard, then replica
  for (const at::Tensor& shard : shards) {
    received.push_back(at::empty({replicas, sum.numel()}, sum.options()));
    group.all_to_all(as_real(received.back()), {}, as_real(shard), {});
  }
  for (int replica = 0; replica < replicas; ++replica) {
    for (size_t shard = 0; shard < shards.size(); ++shard) {
      const at::Tensor term = received[shard][replica];
      replica == 0 && shard == 0 ? sum.copy_(term) : sum.add_(term);
    }
  }
}

}  // namespace

bool BucketOptions::same_sums(const BucketOptions& other) const {
  const auto fields = [](const BucketOptions& options) {
    return std::tie(options.bucket_bytes, options.gradient_shards, options.overlapping,
                    options.backward_passes, options.gradient_as_bucket_view,
                    options.gradients_as_summed);
  };
  return fields(*this) == fields(other);
}

GradientBuckets::GradientBuckets(const std::vector<at::Tensor>& parameters,
                                 std::vector<std::string> names, comm::CommunicatorPtr group,
                                 const BucketOptions& options)
    : GradientBuckets(
          parameters, std::move(names), group, options,
          make_bucket_layout(parameters, sum_options(parameters), reverse_order(parameters.size()),
                             sizes_of(options, group->size())),
          nullptr) {}

GradientBuckets::GradientBuckets(std::shared_ptr<ParameterPieces> pieces,
                                 const BucketOptions& options)
    : GradientBuckets(pieces->parameters(), pieces->names(), pieces->group(), options,
                      pieces->layout(), pieces) {}

GradientBuckets::GradientBuckets(const std::vector<at::Tensor>& parameters,
                                 std::vector<std::string> names, comm::CommunicatorPtr group,
                                 const BucketOptions& options, BucketLayout layout,
                                 std::shared_ptr<ParameterPieces> pieces)
    : WholeGradients(
          layout.members, std::move(names), std::move(group), options,
          {[this](size_t bucket) { return start(bucket); }, "replicas reduced gradient", "",
           /*awaits_all=*/false, most_under_way(options.microbatches, pieces != nullptr)}),
      parameters_(parameters),
      options_(options),
      layout_(std::move(layout)),
      pieces_(std::move(pieces)) {
  for (int shard = 0; shard < shards(); ++shard) {
    memory_.push_back(
        {std::vector<at::Tensor>(layout_.size()), std::vector<at::Tensor>(parameters_.size())});
    for (size_t bucket = 0; pieces_ == nullptr && bucket < layout_.size(); ++bucket) {
      allocate(shard, bucket);
    }
  }
}

void GradientBuckets::set_microbatches(int count, double divisor) {
  StepGradients::set_microbatches(count, divisor);
  queue_.set_most_under_way(most_under_way(count, pieces_ != nullptr));
}

void GradientBuckets::allocate(int shard, size_t bucket) {
  at::Tensor& flat = memory_[shard].buckets[bucket];
  flat = at::zeros({layout_.numel[bucket]}, layout_.options[bucket]);
  for (size_t i : layout_.members[bucket]) {
    memory_[shard].slices[i] = gradient_slice(flat, layout_.slots[i].offset, parameters_[i]);
  }
}

void GradientBuckets::set_hook(CommHook hook, Group replicas) {
  SMP_INTERNAL_ASSERT(pieces_ == nullptr && shards() == 1, "a hook reduces whole buckets");
  hook_ = std::move(hook);
  hook_group_ = std::move(replicas);
  set_reduces_to_means();
}

GradBucket GradientBuckets::grad_bucket(size_t bucket) const {
  GradBucket result{bucket,       queue_.size(), memory_[0].buckets[bucket], {}, {}, {},
                    *hook_group_, divisor()};
  for (size_t index : layout_.members[bucket]) {
    result.parameters.push_back(parameters_[index]);
    result.gradients.push_back(memory_[0].slices[index]);
    result.names.push_back(queue_.name(index));
  }
  return result;
}

void GradientBuckets::accumulate(int shard, size_t index, at::Tensor gradient, bool first,
                                 core::TensorUpdates& updates) {
  const at::AutoDispatchBelowADInplaceOrView no_history;
  first ? updates.copy(claimed(shard, index), gradient)
        : updates.add(memory_[shard].slices[index], gradient);
}

at::Tensor GradientBuckets::buffer(size_t index, int microbatch) {
  const int shard = shard_of(microbatch);
  SMP_INTERNAL_ASSERT(sum_options(parameters_[index]).dtype() == parameters_[index].dtype(),
                      "the gradient of \"", queue_.name(index), "\" is summed in another dtype");
  if (begin(shard, index)) claimed(shard, index).zero_();
  return memory_[shard].slices[index];
}

/// Where a sum begins. The gradient that lies there, or that the program has kept, gets memory of
/// its own.
at::Tensor& GradientBuckets::claimed(int shard, size_t index) {
  at::Tensor& slice = memory_[shard].slices[index];
  if (!slice.defined()) allocate(shard, layout_.slots[index].bucket);
  claim(slice);
  return slice;
}

/// Sums of the shards of this replica; for pieces, they are given away.
std::vector<at::Tensor> GradientBuckets::take_sums(size_t bucket) {
  std::vector<at::Tensor> sums;
  for (int shard = 0; shard < shards(); ++shard) {
    for (size_t i : layout_.members[bucket]) {
      if (!has_sum(shard, i)) claimed(shard, i).zero_();
    }
    sums.push_back(memory_[shard].buckets[bucket]);
    if (pieces_ == nullptr) continue;
    memory_[shard].buckets[bucket].reset();
    for (size_t i : layout_.members[bucket]) memory_[shard].slices[i].reset();
  }
  return sums;
}

WorkPtr GradientBuckets::start(size_t bucket) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> sums = take_sums(bucket);
  if (hook_) return hook_(grad_bucket(bucket));
  const int64_t numel = layout_.numel[bucket];
  const int replicas = replicas_->size();
  if (shards() == 1 && pieces_ == nullptr) {
    return launch(bucket, sums, [sum = sums[0]](comm::TaskCollectives& group) {
      group.all_reduce(as_real(sum));
    });
  }
  if (pieces_ == nullptr) {
    // The first shard's memory takes the result.
    const at::Tensor part =
        sums[0].narrow(0, replicas_->rank() * (numel / replicas), numel / replicas);
    return launch(bucket, sums, [=](comm::TaskCollectives& group) {
      const at::NoGradGuard no_grad;
      add_shards(group, replicas, sums, part);
      group.all_gather(as_real(sums[0]), as_real(part));
    });
  }
  sums_[bucket] = at::empty({numel / replicas}, layout_.options[bucket]);
  return launch(bucket, sums, [=, part = sums_[bucket]](comm::TaskCollectives& group) {
    const at::NoGradGuard no_grad;
    if (sums.size() == 1) {
      group.reduce_scatter(as_real(part), as_real(sums[0]));
    } else {
      add_shards(group, replicas, sums, part);
    }
  });
}

/// A parameter's sum, or this replica's piece of it, which is no view to autograd.
StepGradients::Reduced GradientBuckets::reduced(size_t index) {
  const at::ScalarType type = parameters_[index].scalar_type();
  if (pieces_) {
    const at::AutoDispatchBelowADInplaceOrView no_view;
    const at::Tensor& part = sums_[layout_.slots[index].bucket];
    return {pieces_->in_part(part, index), type, /*overwrites=*/true};
  }
  // The value added to `.grad` may lie in the bucket, too.
  const bool overwrites = options_.gradient_as_bucket_view || parameters_[index].grad().defined();
  return {memory_[0].slices[index], type, overwrites};
}

void GradientBuckets::publish(size_t index, const at::Tensor& mean, core::TensorUpdates& updates) {
  pieces_ ? pieces_->add_gradient(index, mean) : add_to_grad(parameters_[index], mean, updates);
}

}  // namespace smp::dp
