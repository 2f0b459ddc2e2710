// SPDX-License-Identifier: Apache-2.0
#include "dp/step_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/div.h>
#include <ATen/ops/scalar_tensor.h>

#include <tuple>
#include <utility>

#include "core/check.h"

namespace smp::dp {
namespace {

void check_microbatches(int microbatches, int shards) {
  SMP_CHECK_WITH(ConfigError, microbatches % shards == 0,
                 "config key \"microbatches\": expected a multiple of the gradient shards of a "
                 "replica (",
                 shards, "), got ", microbatches,
                 ". Change \"microbatches\" or \"gradient_shards\"");
}

/// How many of the shards a replica sums.
int local_shards(const StepGradientOptions& options, int replicas) {
  SMP_CHECK_WITH(
      ConfigError, options.gradient_shards > 0 && options.gradient_shards % replicas == 0,
      "config key \"gradient_shards\": expected a multiple of the number of replicas (", replicas,
      "), got ", options.gradient_shards, ". Leave it at 0 to use the number of replicas");
  const int shards = options.gradient_shards / replicas;
  check_microbatches(options.microbatches, shards);
  return shards;
}

}  // namespace

StepGradients::StepGradients(std::vector<std::vector<size_t>> members,
                             std::vector<std::string> names, comm::CommunicatorPtr replicas,
                             const StepGradientOptions& options, BucketQueue::Policy policy)
    : replicas_(std::move(replicas)),
      queue_(std::move(members), names, std::move(policy)),
      sums_(queue_.size()),
      options_(options),
      shards_(local_shards(options, replicas_->size())),
      counted_replicas_(replicas_->size()),
      used_(shards_, std::vector<bool>(names.size(), false)) {}

void StepGradients::set_microbatches(int count, double divisor) {
  check_microbatches(count, shards_);
  options_.microbatches = count;
  if (std::exchange(options_.divisor, divisor) != divisor) divisors_.clear();
}

void StepGradients::set_counted_replicas(int count) {
  if (std::exchange(counted_replicas_, count) != count) divisors_.clear();
}

void StepGradients::add(size_t index, int microbatch, at::Tensor gradient) {
  const at::NoGradGuard no_grad;
  core::TensorUpdates updates;
  accumulate(index, microbatch, std::move(gradient), updates);
  updates.run();
}

void StepGradients::add(int microbatch, const std::vector<Given>& gradients) {
  const at::NoGradGuard no_grad;
  core::TensorUpdates updates;
  for (const auto& [index, gradient] : gradients) {
    accumulate(index, microbatch, gradient, updates);
  }
  updates.run();
}

void StepGradients::accumulate(size_t index, int microbatch, at::Tensor gradient,
                               core::TensorUpdates& updates) {
  SMP_CHECK_WITH(UsageError, gradient.layout() == at::kStrided, "parameter \"", queue_.name(index),
                 "\" has a sparse gradient, which cannot be reduced. Build its embedding with "
                 "sparse(false)");
  SMP_INTERNAL_ASSERT(!queue_.has_started(index), "parameter \"", queue_.name(index),
                      "\" got a gradient of microbatch ", microbatch,
                      " when its bucket was being reduced");
  const int shard = shard_of(microbatch);
  const bool first = begin(shard, index);
  accumulate(shard, index, std::move(gradient), first, updates);
}

bool StepGradients::begin(int shard, size_t index) {
  const bool is_new = !used_[shard][index];
  used_[shard][index] = true;
  return is_new;
}

bool StepGradients::start_complete() {
  return options_.overlapping && reduces() && queue_.start_ready();
}

WorkPtr StepGradients::launch(size_t bucket, std::vector<at::Tensor> sums,
                              comm::CollectiveTask task) {
  if (observer_) {
    ReductionEvent event{bucket, 0, false};
    for (const at::Tensor& sum : sums) event.bytes += static_cast<int64_t>(sum.nbytes());
    task = [task = std::move(task), observer = observer_,
            event](comm::TaskCollectives& replicas) mutable {
      observer(event);
      task(replicas);
      event.has_ended = true;
      observer(event);
    };
  }
  const at::Device device = sums.front().device();
  // The thread that waits frees the sums.
  return then(replicas_->start(device, std::move(task)), [sums = std::move(sums)] {});
}

void StepGradients::reduce() {
  if (reduces()) queue_.start_all();
}

void StepGradients::finish() {
  if (reduces()) {
    if (queue_.size() > 0) finish_reduction();
    for (auto& shard : used_) shard.assign(shard.size(), false);
    passes_ = 0;
  } else {
    ++passes_;
  }
  queue_.reset();
}

void StepGradients::finish_reduction() {
  // After all buckets of all models, so that replicas reduce in one order.
  const at::Tensor used = used_by_any(used_);
  const WorkPtr usage = replicas_->async().all_reduce(used, ReduceOp::kMax);
  queue_.wait();
  usage->wait();
  const at::NoGradGuard no_grad;
  for (size_t bucket = 0; bucket < queue_.size(); ++bucket) {
    std::vector<size_t> indices;
    std::vector<Reduced> sums;
    for (size_t index : buckets()[bucket]) {
      if (used.const_data_ptr<uint8_t>()[index] == 0) continue;
      indices.push_back(index);
      sums.push_back(reduced(index));
    }
    const auto means = this->means(std::move(sums));
    core::TensorUpdates updates;
    for (size_t i = 0; i < indices.size(); ++i) publish(indices[i], means[i], updates);
    updates.run();
    sums_[bucket].reset();
  }
}

std::vector<at::Tensor> StepGradients::means(std::vector<Reduced> sums) {
  std::vector<at::Tensor> result(sums.size());
  const auto has_type = [&](const Reduced& reduced) {
    return options_.gradients_as_summed || reduced.sum.scalar_type() == reduced.parameter;
  };
  const auto set = [&](size_t i, at::Tensor mean) {
    result[i] = has_type(sums[i]) ? std::move(mean) : mean.to(sums[i].parameter);
    sums[i].sum.reset();
  };
  std::map<std::tuple<c10::DeviceIndex, at::ScalarType, bool>, std::vector<size_t>> lists;
  for (size_t i = 0; i < sums.size(); ++i) {
    const at::Tensor& sum = sums[i].sum;
    const bool overwrites = sums[i].overwrites;
    if (reduces_to_means_) {
      set(i, overwrites || !has_type(sums[i]) ? sum : sum.clone());
    } else if (core::fits_lists(sum)) {
      lists[{sum.device().index(), sum.scalar_type(), overwrites}].push_back(i);
    } else {
      set(i, overwrites ? sum.div_(divisor_of(sum)) : at::div(sum, divisor_of(sum)));
    }
  }
  for (const auto& [key, list] : lists) {
    std::vector<at::Tensor> divided;
    for (size_t i : list) divided.push_back(sums[i].sum);
    if (std::get<bool>(key)) {
      if (divisor() != 1) at::_foreach_div_(divided, divisor());
    } else {
      divided = at::_foreach_div(divided, divisor());
    }
    for (size_t k = 0; k < list.size(); ++k) set(list[k], std::move(divided[k]));
  }
  return result;
}

const at::Tensor& StepGradients::divisor_of(const at::Tensor& sum) {
  at::Tensor& divisor = divisors_[sum.scalar_type()];
  if (!divisor.defined()) divisor = at::scalar_tensor(this->divisor(), sum.scalar_type());
  return divisor;
}

void add_to_grad(const at::Tensor& parameter, const at::Tensor& gradient,
                 core::TensorUpdates& updates) {
  at::Tensor& grad = parameter.mutable_grad();
  if (grad.defined()) {
    updates.add(grad, gradient);
  } else {
    grad = gradient;
  }
}

at::Tensor sum_in_order(const at::Tensor& rows) {
  at::Tensor sum = rows[0];
  for (int64_t row = 1; row < rows.size(0); ++row) sum.add_(rows[row]);
  return sum;
}

}  // namespace smp::dp
