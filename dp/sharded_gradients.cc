// SPDX-License-Identifier: Apache-2.0
#include "dp/sharded_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <utility>

namespace smp::dp {
namespace {

std::vector<std::vector<size_t>> members_of(const ShardedParameters& parameters,
                                            const std::vector<size_t>& order,
                                            int64_t bucket_elements) {
  std::vector<BucketItem> items;
  for (size_t i : order) {
    items.push_back(
        {i, c10::str(sum_options(parameters.parameter(i)).dtype()), parameters.numel(i)});
  }
  return fill_buckets(items, bucket_elements, bucket_elements);
}

}  // namespace

ShardedGradients::ShardedGradients(std::shared_ptr<ShardedParameters> parameters,
                                   const std::vector<size_t>& order, comm::CommunicatorPtr replicas,
                                   comm::CommunicatorPtr replication_group,
                                   const ShardedGradientOptions& options)
    : StepGradients(members_of(*parameters, order, options.bucket_elements), parameters->names(),
                    std::move(replicas), options,
                    {[this](size_t bucket) { return start(bucket); },
                     "sharded data parallelism reduced gradient", "",
                     /*awaits_all=*/false, /*most_under_way=*/1}),
      parameters_(std::move(parameters)),
      replication_group_(std::move(replication_group)),
      memory_(queue_.size()) {
  layout_.slots.resize(parameters_->size());
  for (size_t bucket = 0; bucket < queue_.size(); ++bucket) {
    const auto& members = buckets()[bucket];
    layout_.options.push_back(sum_options(parameters_->parameter(members.front())));
    int64_t& numel = layout_.numel.emplace_back(0);
    for (size_t i : members) {
      layout_.slots[i] = {bucket, numel};
      numel += range(i).length;
    }
  }
}

/// How the ranks with the same shard of a parameter divide the sum of its gradients.
comm::Range ShardedGradients::range(size_t index) const {
  const int ranks = replication_group_->size();
  return {0, (parameters_->range(index).length + ranks - 1) / ranks};
}

/// Zeros at first.
at::Tensor& ShardedGradients::sums(size_t bucket) {
  at::Tensor& sums = memory_[bucket];
  if (!sums.defined()) {
    sums = at::zeros(
        {replication_group_->size(), parameters_->group()->size(), shards(), layout_.numel[bucket]},
        layout_.options[bucket]);
  }
  return sums;
}

void ShardedGradients::accumulate(int shard, size_t index, at::Tensor gradient, bool first,
                                  core::TensorUpdates& updates) {
  const auto [bucket, offset] = layout_.slots[index];
  const at::Tensor& sums = this->sums(bucket);
  const at::Tensor flat = parameters_->flat(gradient, index);
  for (int owner = 0; owner < parameters_->group()->size(); ++owner) {
    const auto [from, to] = parameters_->owned(index, owner);
    for (int alike = 0; alike < replication_group_->size(); ++alike) {
      const auto [begin, end] = range(index).of(alike, to - from);
      if (begin == end) continue;
      const at::Tensor sum = sums[alike][owner][shard].narrow(0, offset, end - begin);
      const at::Tensor piece = flat.slice(0, from + begin, from + end);
      first ? updates.copy(sum, piece) : updates.add(sum, piece);
    }
  }
}

/// Without a gradient here a bucket takes part with zeros. This rank adds its pieces of all shards
/// of all replicas, in order; then the pieces of its parameters' shards are put together.
WorkPtr ShardedGradients::start(size_t bucket) {
  const at::NoGradGuard no_grad;
  const at::Tensor sums = std::exchange(this->sums(bucket), at::Tensor());
  const at::TensorOptions& options = layout_.options[bucket];
  const int64_t numel = layout_.numel[bucket];
  const at::Tensor result = at::empty({replication_group_->size(), numel}, options);
  const int64_t rows = shards() == 1 ? 0 : replicas_->size() * shards();
  const at::Tensor received = at::empty({rows, numel}, options);
  sums_[bucket] = result;
  const auto reduce = [sums, received, result,
                       group = replication_group_](comm::TaskCollectives& replicas) {
    const at::NoGradGuard no_grad;
    const at::Tensor own = result[group->rank()];
    if (received.numel() == 0) {
      replicas.reduce_scatter(as_real(own), as_real(sums));
    } else {
      replicas.all_to_all(as_real(received), {}, as_real(sums), {});
      own.copy_(sum_in_order(received));
    }
    group->all_gather(as_real(result), as_real(own));
  };
  return launch(bucket, {sums}, reduce);
}

/// Puts the pieces of the replication group together, one after the other.
StepGradients::Reduced ShardedGradients::reduced(size_t index) {
  const auto [bucket, offset] = layout_.slots[index];
  const at::Tensor& shard = parameters_->shard(index);
  const at::Tensor sum = sums_[bucket].narrow(1, offset, range(index).length).reshape({-1});
  return {sum.narrow(0, 0, shard.numel()), shard.scalar_type(), /*overwrites=*/false};
}

void ShardedGradients::publish(size_t index, const at::Tensor& mean, core::TensorUpdates&) {
  parameters_->add_gradient(index, mean);
}

}  // namespace smp::dp
