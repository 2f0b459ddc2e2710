#include "dp/sharded_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <utility>

#include "core/check.h"
#include "dp/bucket_layout.h"
#include "dp/comm_errors.h"
#include "dp/gradient_shards.h"

namespace smp::dp {

ShardedGradients::ShardedGradients(std::shared_ptr<ShardedParameters> parameters,
                                   const std::vector<size_t>& order, comm::CommunicatorPtr replicas,
                                   comm::CommunicatorPtr twins,
                                   const ShardedGradientOptions& options)
    : parameters_(std::move(parameters)),
      replicas_(std::move(replicas)),
      twins_(std::move(twins)),
      options_(options),
      local_shards_(
          local_gradient_shards(options.gradient_shards, options.microbatches, replicas_->size())),
      slots_(parameters_->size()),
      used_(local_shards_, std::vector<bool>(parameters_->size(), false)) {
  fill_buckets(order);
}

void ShardedGradients::fill_buckets(const std::vector<size_t>& order) {
  std::map<at::ScalarType, Bucket> open;
  for (size_t index : order) {
    const at::TensorOptions options = sum_options(parameters_->parameter(index));
    Bucket& bucket = open.try_emplace(c10::typeMetaToScalarType(options.dtype())).first->second;
    const int64_t numel = parameters_->numel(index);
    if (!bucket.members.empty() && bucket.elements + numel > options_.bucket_elements) {
      buckets_.push_back(std::exchange(bucket, Bucket()));
    }
    const int64_t piece = (parameters_->length(index) + twins_->size() - 1) / twins_->size();
    slots_[index] = {0, bucket.width, piece};
    bucket.members.push_back(index);
    bucket.options = options;
    bucket.elements += numel;
    bucket.width += piece;
  }
  for (auto& [dtype, bucket] : open) buckets_.push_back(std::move(bucket));
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (size_t index : buckets_[b].members) slots_[index].bucket = b;
    buckets_[b].missing = buckets_[b].members.size();
  }
}

std::vector<std::vector<size_t>> ShardedGradients::buckets() const {
  std::vector<std::vector<size_t>> result;
  for (const Bucket& bucket : buckets_) result.push_back(bucket.members);
  return result;
}

void ShardedGradients::add(size_t parameter, int microbatch, const at::Tensor& gradient) {
  check_dense(gradient, parameters_->name(parameter));
  at::NoGradGuard no_grad;
  const Slot& slot = slots_[parameter];
  Bucket& bucket = buckets_[slot.bucket];
  const int ranks = replicas_->size();
  if (!bucket.sums.defined()) {
    bucket.sums = at::zeros({ranks, local_shards_, bucket.width}, bucket.options);
  }
  const int shard = microbatch / (options_.microbatches / local_shards_);
  const bool first = !used_[shard][parameter];
  used_[shard][parameter] = true;
  const int degree = parameters_->group()->size();
  const at::Tensor flat = parameters_->elements(gradient, parameter, {0, gradient.numel(), 0, {}});
  for (int rank = 0; rank < ranks; ++rank) {
    const auto owned = parameters_->piece_of(parameter, rank % degree);
    const int64_t begin = std::min(owned.numel(), rank / degree * slot.piece);
    const int64_t numel = std::min(owned.numel(), begin + slot.piece) - begin;
    if (numel == 0) continue;
    const at::Tensor sum = bucket.sums[rank][shard].narrow(0, slot.offset, numel);
    const at::Tensor piece = flat.narrow(0, owned.begin + begin, numel);
    first ? sum.copy_(piece) : sum.add_(piece);
  }
  if (microbatch + 1 < options_.microbatches || !reduces()) return;
  --bucket.missing;
  start_complete();
}

/// In ascending order, which is the same on all ranks whatever becomes complete first.
void ShardedGradients::start_complete() {
  while (next_ < buckets_.size() && buckets_[next_].missing == 0) start(next_);
}

void ShardedGradients::reduce() {
  while (reduces() && next_ < buckets_.size()) start(next_);
}

/// Calls something that communicates for a bucket. What goes wrong then says for which.
template <class Call>
void ShardedGradients::name_in_errors(size_t bucket, const Call& call) const {
  const auto where = [&] {
    const auto& members = buckets_[bucket].members;
    std::string text =
        c10::str(" [while sharded data parallelism reduced gradient bucket ", bucket + 1, " of ",
                 buckets_.size(), ": ", parameters_->name(members.front()));
    if (members.size() > 1) text += " ... " + parameters_->name(members.back());
    return text + "]";
  };
  with_where_in_errors(where, call);
}

/// Without a gradient here a bucket takes part with zeros.
void ShardedGradients::start(size_t index) {
  at::NoGradGuard no_grad;
  if (index > 0) settle(index - 1);
  Bucket& bucket = buckets_[index];
  ++next_;
  const int ranks = replicas_->size();
  if (!bucket.sums.defined()) {
    bucket.sums = at::zeros({ranks, local_shards_, bucket.width}, bucket.options);
  }
  name_in_errors(index, [&] {
    if (local_shards_ == 1) {
      bucket.received = at::empty({1, bucket.width}, bucket.options);
      bucket.work = replicas_->async().reduce_scatter(as_real(bucket.received),
                                                      as_real(bucket.sums), ReduceOp::kSum);
    } else {
      bucket.received = at::empty({ranks * local_shards_, bucket.width}, bucket.options);
      bucket.work =
          replicas_->async().all_to_all(as_real(bucket.received), {}, as_real(bucket.sums), {});
    }
  });
}

/// When this rank has its pieces: all shards of all replicas are added in order, and the pieces of
/// its parameters' shards put together.
void ShardedGradients::settle(size_t index) {
  Bucket& bucket = buckets_[index];
  if (!bucket.received.defined()) return;
  name_in_errors(index, [&] { bucket.work->wait(); });
  bucket.sums.reset();
  at::Tensor sum = bucket.received[0];
  for (int64_t shard = 1; shard < bucket.received.size(0); ++shard) {
    sum.add_(bucket.received[shard]);
  }
  bucket.received.reset();
  bucket.work = nullptr;
  if (twins_->size() == 1) {
    bucket.reduced = sum.unsqueeze(0);
    return;
  }
  bucket.reduced = at::empty({twins_->size(), bucket.width}, bucket.options);
  name_in_errors(index, [&] {
    bucket.work = twins_->async().all_gather(as_real(bucket.reduced), as_real(sum.contiguous()));
  });
}

void ShardedGradients::reduce_usage() {
  any_used_ = used_by_any(used_);
  replicas_->all_reduce(any_used_, ReduceOp::kMax);
}

void ShardedGradients::finish() {
  if (!reduces()) {
    ++passes_;
    return;
  }
  if (!buckets_.empty()) {
    settle(buckets_.size() - 1);
    reduce_usage();
  }
  at::NoGradGuard no_grad;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    if (bucket.work) name_in_errors(b, [&] { bucket.work->wait(); });
    publish(b);
    bucket.work = nullptr;
    bucket.reduced.reset();
    bucket.missing = bucket.members.size();
  }
  passes_ = 0;
  next_ = 0;
  for (auto& shard : used_) shard.assign(parameters_->size(), false);
}

/// Divides the sums of a bucket's shards and adds them to `.grad`.
void ShardedGradients::publish(size_t index) {
  const Bucket& bucket = buckets_[index];
  for (size_t member : bucket.members) {
    const at::Tensor& shard = parameters_->shard(member);
    if (any_used_.const_data_ptr<uint8_t>()[member] == 0) continue;
    const Slot& slot = slots_[member];
    // The pieces of the twins, one after the other.
    const at::Tensor sum = bucket.reduced.narrow(1, slot.offset, slot.piece).reshape({-1});
    const at::Tensor mean = at::div(sum.narrow(0, 0, shard.numel()), options_.divisor);
    parameters_->add_gradient(member,
                              options_.gradients_as_summed ? mean : mean.to(shard.scalar_type()));
  }
}

}  // namespace smp::dp
