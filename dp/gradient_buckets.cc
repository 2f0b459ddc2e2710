#include "dp/gradient_buckets.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <tuple>

#include "core/check.h"
#include "dp/gradient_shards.h"

namespace smp::dp {
namespace {

/// Gives what the program has kept of a view memory of its own. Returns whether it was kept.
bool leave_to_program(at::Tensor& view) {
  if (view.use_count() <= 1) return false;
  view.set_data(view.clone());
  return true;
}

}  // namespace

bool BucketOptions::operator==(const BucketOptions& other) const {
  const auto fields = [](const BucketOptions& options) {
    return std::tie(options.bucket_bytes, options.microbatches, options.gradient_shards,
                    options.divisor, options.overlapping, options.backward_passes,
                    options.gradient_as_bucket_view, options.gradients_as_summed);
  };
  return fields(*this) == fields(other);
}

GradientBuckets::GradientBuckets(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                 comm::CommunicatorPtr group, const BucketOptions& options)
    : GradientBuckets(
          parameters, std::move(names), std::move(group), options,
          make_bucket_layout(parameters, sum_options(parameters), reverse_order(parameters.size()),
                             {options.bucket_bytes, options.bucket_bytes}),
          nullptr) {}

GradientBuckets::GradientBuckets(std::shared_ptr<ParameterSlices> slices,
                                 const BucketOptions& options)
    : GradientBuckets(slices->parameters(), slices->names(), slices->group(), options,
                      slices->layout(), slices) {}

GradientBuckets::GradientBuckets(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                 comm::CommunicatorPtr group, const BucketOptions& options,
                                 BucketLayout layout, std::shared_ptr<ParameterSlices> slices)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      group_(std::move(group)),
      options_(options),
      local_shards_(
          local_gradient_shards(options.gradient_shards, options.microbatches, group_->size())),
      layout_(std::move(layout)),
      slices_(std::move(slices)),
      pieces_(parameters_.size()),
      complete_(parameters_.size(), true) {
  make_buffers();
}

void GradientBuckets::make_buffers() {
  buffers_.resize(local_shards_);
  targets_.resize(local_shards_);
  used_.assign(local_shards_, std::vector<bool>(parameters_.size(), false));
  for (int shard = 0; shard < local_shards_; ++shard) {
    auto& buffers = buffers_[shard];
    for (size_t b = 0; b < layout_.size(); ++b) {
      buffers.push_back(at::zeros({layout_.numel[b]}, layout_.options[b]));
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      targets_[shard].push_back(slice(buffers[layout_.slots[i].bucket], i));
    }
  }
  for (size_t i = 0; slices_ && i < parameters_.size(); ++i) {
    pieces_[i] = piece(slices_->part(buffers_[0][layout_.slots[i].bucket]), i);
  }
}

/// Of the gradient of a parameter, in this replica's part of its bucket. No view to autograd.
at::Tensor GradientBuckets::piece(const at::Tensor& part, size_t index) const {
  const at::AutoDispatchBelowADInplaceOrView no_view;
  const ParameterSlices::Piece& owned = slices_->pieces()[index];
  return part.narrow(0, owned.offset, owned.numel());
}

at::Tensor GradientBuckets::slice(const at::Tensor& buffer, size_t index) const {
  return gradient_slice(buffer, layout_.slots[index].offset, parameters_[index]);
}

int GradientBuckets::shard_of(int microbatch) const {
  return microbatch / (options_.microbatches / local_shards_);
}

void GradientBuckets::add(size_t index, int microbatch, const at::Tensor& gradient) {
  check_dense(gradient, names_[index]);
  at::NoGradGuard no_grad;
  const int shard = shard_of(microbatch);
  if (used_[shard][index]) {
    targets_[shard][index].add_(gradient);
  } else {
    begin(shard, index).copy_(gradient);
  }
}

at::Tensor GradientBuckets::buffer(size_t index, int microbatch) {
  const int shard = shard_of(microbatch);
  SMP_INTERNAL_ASSERT(targets_[shard][index].scalar_type() == parameters_[index].scalar_type(),
                      "the gradient of \"", names_[index], "\" is summed in another dtype");
  if (!used_[shard][index]) begin(shard, index).zero_();
  return targets_[shard][index];
}

/// Where a sum begins. The gradient that lies there, or that the program has kept, gets memory of
/// its own.
at::Tensor& GradientBuckets::begin(int shard, size_t index) {
  used_[shard][index] = true;
  const at::Tensor& buffer = buffers_[shard][layout_.slots[index].bucket];
  if (shard == 0 && leave_to_program(pieces_[index])) {
    pieces_[index] = piece(slices_->part(buffer), index);
  }
  at::Tensor& target = targets_[shard][index];
  if (leave_to_program(target)) target = slice(buffer, index);
  return target;
}

/// All shards of all replicas, in order; with slices, of this replica's part.
at::Tensor GradientBuckets::gather_shards(size_t bucket) const {
  const auto options = layout_.options[bucket];
  const int64_t numel = layout_.numel[bucket];
  const int64_t parts = slices_ ? group_->size() : 1;
  at::Tensor mine = at::empty({parts, local_shards_, numel / parts}, options);
  for (int shard = 0; shard < local_shards_; ++shard) {
    mine.select(1, shard).copy_(buffers_[shard][bucket].view({parts, -1}));
  }
  at::Tensor all = at::empty({options_.gradient_shards, numel / parts}, options);
  if (slices_) {
    group_->all_to_all(as_real(all), {}, as_real(mine), {});
  } else {
    group_->all_gather(as_real(all), as_real(mine));
  }
  return all;
}

/// What one process with as many shards computes.
at::Tensor GradientBuckets::sum_shards_in_order(size_t bucket) const {
  if (group_->size() == 1) {
    at::Tensor sum = buffers_[0][bucket].clone();
    for (int shard = 1; shard < local_shards_; ++shard) sum.add_(buffers_[shard][bucket]);
    return sum;
  }
  const at::Tensor all = gather_shards(bucket);
  at::Tensor sum = all[0].clone();
  for (int shard = 1; shard < options_.gradient_shards; ++shard) sum.add_(all[shard]);
  return sum;
}

bool GradientBuckets::reduce_complete() {
  // Shards of a replica are added one after the other, while the rank waits.
  if (!options_.overlapping || local_shards_ > 1 || !reduces()) return false;
  const auto is_complete = [&](size_t bucket) {
    const auto& members = layout_.members[bucket];
    return std::all_of(members.begin(), members.end(), [&](size_t i) { return complete_[i]; });
  };
  while (sums_.size() < layout_.size() && is_complete(sums_.size())) start(sums_.size());
  return sums_.size() == layout_.size();
}

void GradientBuckets::reduce() {
  while (reduces() && sums_.size() < layout_.size()) start(sums_.size());
}

/// After all buckets of all models, so that replicas reduce in one order.
void GradientBuckets::reduce_usage() {
  any_used_ = used_by_any(used_);
  works_.push_back(group_->async().all_reduce(any_used_, ReduceOp::kMax));
}

void GradientBuckets::start(size_t bucket) {
  at::NoGradGuard no_grad;
  for (int shard = 0; shard < local_shards_; ++shard) {
    for (size_t i : layout_.members[bucket]) {
      if (used_[shard][i]) continue;
      begin(shard, i).zero_();
      used_[shard][i] = false;
    }
  }
  if (local_shards_ > 1) {
    sums_.push_back(sum_shards_in_order(bucket));
  } else if (slices_) {
    const at::Tensor& buffer = buffers_[0][bucket];
    sums_.push_back(slices_->part(buffer));
    works_.push_back(
        group_->async().reduce_scatter(as_real(sums_.back()), as_real(buffer), ReduceOp::kSum));
  } else {
    sums_.push_back(buffers_[0][bucket]);
    works_.push_back(group_->async().all_reduce(as_real(sums_.back()), ReduceOp::kSum));
  }
}

void GradientBuckets::finish() {
  std::fill(complete_.begin(), complete_.end(), true);
  if (!reduces()) {
    ++passes_;
    return;
  }
  reduce_usage();
  for (auto& work : works_) work->wait();
  works_.clear();
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (any_used_.const_data_ptr<uint8_t>()[i] != 0) publish(i);
  }
  sums_.clear();
  passes_ = 0;
  for (auto& shard : used_) shard.assign(parameters_.size(), false);
}

/// A parameter's sum, or this replica's piece of it, divided, in the dtype of `.grad`.
at::Tensor GradientBuckets::result(size_t index) {
  at::Tensor& target = slices_ ? pieces_[index] : targets_[0][index];
  const at::ScalarType type =
      (options_.gradients_as_summed ? target : parameters_[index]).scalar_type();
  if (options_.gradient_as_bucket_view && local_shards_ == 1 && target.scalar_type() == type) {
    return target.div_(options_.divisor);
  }
  const at::Tensor& sum = sums_[layout_.slots[index].bucket];
  return at::div(slices_ ? piece(sum, index) : slice(sum, index), options_.divisor).to(type);
}

/// Adds a parameter's result to `.grad`.
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
