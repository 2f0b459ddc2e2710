// SPDX-License-Identifier: Apache-2.0
#include "dp/gradient_buckets.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <tuple>
#include <utility>

#include "core/check.h"

namespace smp::dp {

bool BucketOptions::operator==(const BucketOptions& other) const {
  const auto fields = [](const BucketOptions& options) {
    return std::tie(options.bucket_bytes, options.microbatches, options.gradient_shards,
                    options.divisor, options.overlapping, options.backward_passes,
                    options.gradient_as_bucket_view, options.gradients_as_summed);
  };
  return fields(*this) == fields(other);
}

GradientBuckets::GradientBuckets(const std::vector<at::Tensor>& parameters,
                                 std::vector<std::string> names, comm::CommunicatorPtr group,
                                 const BucketOptions& options)
    : GradientBuckets(
          parameters, std::move(names), std::move(group), options,
          make_bucket_layout(parameters, sum_options(parameters), reverse_order(parameters.size()),
                             {options.bucket_bytes, options.bucket_bytes}),
          nullptr) {}

GradientBuckets::GradientBuckets(std::shared_ptr<ParameterSlices> slices,
                                 const BucketOptions& options)
    : GradientBuckets(slices->parameters(), slices->names(), slices->group(), options,
                      slices->layout(), slices) {}

GradientBuckets::GradientBuckets(const std::vector<at::Tensor>& parameters,
                                 std::vector<std::string> names, comm::CommunicatorPtr group,
                                 const BucketOptions& options, BucketLayout layout,
                                 std::shared_ptr<ParameterSlices> slices)
    : StepGradients(layout.members, std::move(names), std::move(group), options,
                    {[this](size_t bucket) { return start(bucket); }, nullptr,
                     "replicas reduced gradient", "",
                     /*awaits_all=*/false}),
      parameters_(parameters),
      options_(options),
      layout_(std::move(layout)),
      slices_(std::move(slices)),
      pieces_(parameters_.size()) {
  for (int shard = 0; shard < shards(); ++shard) {
    memory_.push_back(make_bucket_memory(
        layout_, parameters_,
        [](int64_t numel, const at::TensorOptions& kind) { return at::zeros({numel}, kind); }));
  }
  for (size_t i = 0; slices_ && i < parameters_.size(); ++i) {
    pieces_[i] = piece(slices_->part(memory_[0].buckets[layout_.slots[i].bucket]), i);
  }
}

void GradientBuckets::set_hook(CommHook hook, Group replicas) {
  SMP_INTERNAL_ASSERT(slices_ == nullptr && shards() == 1, "a hook reduces whole buckets");
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

/// Of the gradient of a parameter, in this replica's part of its bucket. No view to autograd.
at::Tensor GradientBuckets::piece(const at::Tensor& part, size_t index) const {
  const at::AutoDispatchBelowADInplaceOrView no_view;
  const ParameterSlices::Piece& owned = slices_->pieces()[index];
  return part.narrow(0, owned.offset, owned.numel());
}

void GradientBuckets::accumulate(int shard, size_t index, const at::Tensor& gradient, bool first) {
  first ? claimed(shard, index).copy_(gradient) : memory_[shard].slices[index].add_(gradient);
}

at::Tensor GradientBuckets::buffer(size_t index, int microbatch) {
  const int shard = shard_of(microbatch);
  const at::Tensor& slice = memory_[shard].slices[index];
  SMP_INTERNAL_ASSERT(slice.scalar_type() == parameters_[index].scalar_type(),
                      "the gradient of \"", queue_.name(index), "\" is summed in another dtype");
  if (begin(shard, index)) claimed(shard, index).zero_();
  return slice;
}

/// Where a sum begins. The gradient that lies there, or that the program has kept, gets memory of
/// its own.
at::Tensor& GradientBuckets::claimed(int shard, size_t index) {
  if (shard == 0) claim(pieces_[index]);
  at::Tensor& slice = memory_[shard].slices[index];
  claim(slice);
  return slice;
}

/// All shards of all replicas, in order; with slices, of this replica's part.
at::Tensor GradientBuckets::gather_shards(size_t bucket) const {
  const int64_t parts = slices_ ? replicas_->size() : 1;
  const int64_t numel = layout_.numel[bucket] / parts;
  const at::Tensor all = at::empty({options_.gradient_shards, numel}, layout_.options[bucket]);
  const at::Tensor mine = slices_
                              ? at::empty({parts, shards(), numel}, layout_.options[bucket])
                              : all.narrow(0, replicas_->rank() * shards(), shards()).unsqueeze(0);
  for (int shard = 0; shard < shards(); ++shard) {
    mine.select(1, shard).copy_(memory_[shard].buckets[bucket].view({parts, -1}));
  }
  if (slices_) {
    replicas_->all_to_all(as_real(all), {}, as_real(mine), {});
  } else {
    replicas_->all_gather(as_real(all), as_real(mine));
  }
  return all;
}

bool GradientBuckets::reduce_complete() {
  // Shards of a replica are added one after the other, while the rank waits.
  return options_.overlapping && shards() == 1 && reduces() && queue_.start_ready();
}

WorkPtr GradientBuckets::start(size_t bucket) {
  const at::NoGradGuard no_grad;
  for (int shard = 0; shard < shards(); ++shard) {
    for (size_t i : layout_.members[bucket]) {
      if (!has_sum(shard, i)) claimed(shard, i).zero_();
    }
  }
  if (shards() > 1) {
    sums_[bucket] = sum_in_order(gather_shards(bucket)).clone();
    return nullptr;
  }
  const at::Tensor& buffer = memory_[0].buckets[bucket];
  sums_[bucket] = slices_ ? slices_->part(buffer) : buffer;
  if (hook_) return hook_(grad_bucket(bucket));
  if (slices_) {
    return replicas_->async().reduce_scatter(as_real(sums_[bucket]), as_real(buffer),
                                             ReduceOp::kSum);
  }
  return replicas_->async().all_reduce(as_real(buffer), ReduceOp::kSum);
}

/// A parameter's sum, or this replica's piece of it, divided, in the dtype of `.grad`.
at::Tensor GradientBuckets::result(size_t index) {
  const at::Tensor& target = slices_ ? pieces_[index] : memory_[0].slices[index];
  const at::ScalarType type = parameters_[index].scalar_type();
  const bool lies_there = options_.gradients_as_summed || target.scalar_type() == type;
  if (options_.gradient_as_bucket_view && shards() == 1 && lies_there) {
    return reduces_to_means() ? target : target.div_(divisor());
  }
  const auto [bucket, offset] = layout_.slots[index];
  return mean(slices_ ? piece(sums_[bucket], index)
                      : gradient_slice(sums_[bucket], offset, parameters_[index]),
              type);
}

void GradientBuckets::publish(size_t index) {
  if (slices_) return slices_->add_gradient(index, result(index));
  at::Tensor& gradient = parameters_[index].mutable_grad();
  if (gradient.defined()) {
    gradient.add_(result(index));
  } else {
    gradient = result(index);
  }
}

}  // namespace smp::dp
