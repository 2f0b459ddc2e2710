#include "dp/gradient_buckets.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>

#include "smp/core/error.h"

namespace smp::dp {
namespace {

constexpr int64_t kAlignment = 64;

at::ScalarType accumulation_type(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

int64_t padded_numel(int64_t numel, at::ScalarType type) {
  const int64_t unit = kAlignment / static_cast<int64_t>(elementSize(type));
  return (numel + unit - 1) / unit * unit;
}

/// Complex numbers are added part by part; communicators know real ones only.
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

}  // namespace

GradientBuckets::GradientBuckets(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                 comm::CommunicatorPtr group, const BucketOptions& options)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      group_(std::move(group)),
      options_(options),
      local_shards_(options.gradient_shards / group_->size()) {
  SMP_CHECK_WITH(ConfigError,
                 options_.gradient_shards > 0 && options_.gradient_shards % group_->size() == 0,
                 "config key \"gradient_shards\": expected a multiple of the number of replicas (",
                 group_->size(), "), got ", options_.gradient_shards,
                 ". Leave it at 0 to use the number of replicas");
  SMP_CHECK_WITH(ConfigError, options_.microbatches % local_shards_ == 0,
                 "config key \"microbatches\": expected a multiple of the gradient shards of a "
                 "replica (",
                 local_shards_, "), got ", options_.microbatches,
                 ". Change \"microbatches\" or \"gradient_shards\"");
  assign_buckets();
  make_buffers();
}

/// Fills buckets from the last parameter to the first, since gradients become ready about in that
/// order; one dtype per bucket.
void GradientBuckets::assign_buckets() {
  slots_.resize(parameters_.size());
  std::map<at::ScalarType, size_t> open;
  for (size_t i = parameters_.size(); i-- > 0;) {
    const at::ScalarType type = accumulation_type(parameters_[i].scalar_type());
    const int64_t numel = padded_numel(parameters_[i].numel(), type);
    const auto bytes = [&](int64_t n) { return n * static_cast<int64_t>(elementSize(type)); };
    auto it = open.find(type);
    if (it == open.end() || bytes(bucket_numel_[it->second] + numel) > options_.bucket_bytes) {
      it = open.insert_or_assign(type, buckets_.size()).first;
      buckets_.emplace_back();
      bucket_numel_.push_back(0);
      bucket_dtype_.push_back(type);
    }
    slots_[i] = {it->second, bucket_numel_[it->second]};
    buckets_[it->second].push_back(i);
    bucket_numel_[it->second] += numel;
  }
}

void GradientBuckets::make_buffers() {
  buffers_.resize(local_shards_);
  targets_.resize(local_shards_);
  used_.assign(local_shards_, std::vector<bool>(parameters_.size(), false));
  for (int shard = 0; shard < local_shards_; ++shard) {
    auto& buffers = buffers_[shard];
    for (size_t b = 0; b < buckets_.size(); ++b) {
      const at::Device device = parameters_[buckets_[b].front()].device();
      buffers.push_back(
          at::zeros({bucket_numel_[b]}, at::TensorOptions(bucket_dtype_[b]).device(device)));
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      targets_[shard].push_back(slice(buffers[slots_[i].bucket], i));
    }
  }
}

/// The part of a bucket that belongs to a parameter, in the parameter's sizes and strides.
at::Tensor GradientBuckets::slice(const at::Tensor& buffer, size_t index) const {
  const at::Tensor& parameter = parameters_[index];
  const at::Tensor flat = buffer.narrow(0, slots_[index].offset, parameter.numel());
  if (parameter.is_non_overlapping_and_dense()) {
    return flat.as_strided(parameter.sizes(), parameter.strides());
  }
  return flat.view(parameter.sizes());
}

int GradientBuckets::shard_of(int microbatch) const {
  return microbatch / (options_.microbatches / local_shards_);
}

void GradientBuckets::add(size_t index, int microbatch, const at::Tensor& gradient) {
  SMP_CHECK_WITH(UsageError, gradient.layout() == at::kStrided, "parameter \"", names_[index],
                 "\" has a sparse gradient, which cannot be reduced. Build its embedding with "
                 "sparse(false)");
  at::NoGradGuard no_grad;
  const int shard = shard_of(microbatch);
  const at::Tensor& target = targets_[shard][index];
  if (used_[shard][index]) {
    target.add_(gradient);
  } else {
    target.copy_(gradient);
    used_[shard][index] = true;
  }
}

at::Tensor GradientBuckets::buffer(size_t index, int microbatch) {
  const int shard = shard_of(microbatch);
  SMP_INTERNAL_ASSERT(targets_[shard][index].scalar_type() == parameters_[index].scalar_type(),
                      "the gradient of \"", names_[index], "\" is summed in another dtype");
  used_[shard][index] = true;  // what is unused is zero
  return targets_[shard][index];
}

/// All shards of all replicas, added in order: what one process with as many shards computes.
at::Tensor GradientBuckets::sum_shards_in_order(size_t bucket) const {
  at::Tensor sum = buffers_[0][bucket].clone();
  if (group_->size() == 1) {
    for (int shard = 1; shard < local_shards_; ++shard) sum.add_(buffers_[shard][bucket]);
    return sum;
  }
  const int64_t numel = bucket_numel_[bucket];
  at::Tensor mine = at::empty({local_shards_, numel}, sum.options());
  for (int shard = 0; shard < local_shards_; ++shard) mine[shard].copy_(buffers_[shard][bucket]);
  at::Tensor all = at::empty({options_.gradient_shards, numel}, sum.options());
  group_->all_gather(as_real(all), as_real(mine));
  sum.copy_(all[0]);
  for (int shard = 1; shard < options_.gradient_shards; ++shard) sum.add_(all[shard]);
  return sum;
}

void GradientBuckets::reduce() {
  at::NoGradGuard no_grad;
  any_used_ = at::zeros({static_cast<int64_t>(parameters_.size())}, at::kByte);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    for (const auto& shard : used_) {
      if (shard[i]) any_used_[static_cast<int64_t>(i)] = 1;
    }
  }
  works_.push_back(group_->iall_reduce(any_used_, comm::ReduceOp::kMax));
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (local_shards_ > 1) {
      sums_.push_back(sum_shards_in_order(b));
    } else {
      sums_.push_back(buffers_[0][b]);
      works_.push_back(group_->iall_reduce(as_real(sums_.back()), comm::ReduceOp::kSum));
    }
  }
}

void GradientBuckets::finish() {
  for (auto& work : works_) work->wait();
  works_.clear();
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (any_used_[static_cast<int64_t>(i)].item<uint8_t>() == 0) continue;
    at::Tensor& parameter = parameters_[i];
    const at::Tensor mean =
        at::div(slice(sums_[slots_[i].bucket], i), options_.divisor).to(parameter.scalar_type());
    if (parameter.grad().defined()) {
      parameter.mutable_grad().add_(mean);
    } else {
      parameter.mutable_grad() = mean;
    }
  }
  sums_.clear();
  for (size_t shard = 0; shard < buffers_.size(); ++shard) {
    for (at::Tensor& buffer : buffers_[shard]) buffer.zero_();
    used_[shard].assign(parameters_.size(), false);
  }
}

}  // namespace smp::dp
