// SPDX-License-Identifier: Apache-2.0
#include "dp/local_gradients.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <numeric>
#include <utility>

#include "dp/bucket_layout.h"

namespace smp::dp {
namespace {

/// One for all parameters.
std::vector<std::vector<size_t>> all_in_one(size_t count) {
  if (count == 0) return {};
  std::vector<size_t> members(count);
  std::iota(members.begin(), members.end(), 0);
  return {std::move(members)};
}

/// Memory for a parameter's sum, with its strides if those are dense.
at::Tensor empty_for(const at::Tensor& parameter) {
  const at::TensorOptions options = sum_options(parameter);
  return parameter.is_non_overlapping_and_dense()
             ? at::empty_strided(parameter.sizes(), parameter.strides(), options)
             : at::empty(parameter.sizes(), options);
}

/// Whether a gradient has memory that no other tensor shares, and lies there as a sum would.
bool may_become_sum(const at::Tensor& gradient, const at::Tensor& parameter) {
  const c10::Storage& storage = gradient.storage();
  // Not a channel's, and not one of which only a part is used.
  const auto libtorchs = c10::GetAllocator(gradient.device().type())->raw_deleter();
  return storage.use_count() == 1 && storage.nbytes() == gradient.nbytes() &&
         storage.data_ptr().get_deleter() == libtorchs &&
         gradient.dtype() == sum_options(parameter).dtype() && !gradient.is_conj() &&
         !gradient.is_neg() && !gradient.is_inference() &&
         torch::autograd::utils::obeys_layout_contract(gradient, parameter);
}

/// A gradient that lies as its parameter does, but that it may have other strides where a size is
/// 1, by which kernels might choose another way.
at::Tensor with_strides_of(const at::Tensor& parameter, const at::Tensor& gradient) {
  if (gradient.strides() == parameter.strides() || !parameter.is_non_overlapping_and_dense()) {
    return gradient;
  }
  const at::AutoDispatchBelowADInplaceOrView no_view;
  return gradient.as_strided(parameter.sizes(), parameter.strides());
}

/// A tensor on a gradient's memory that is no view to autograd, and so does not hold the gradient's
/// base.
at::Tensor taken(at::Tensor gradient) {
  const at::AutoDispatchBelowADInplaceOrView no_view;
  return gradient.alias();
}

}  // namespace

LocalGradients::LocalGradients(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                               comm::CommunicatorPtr rank_alone, const StepGradientOptions& options)
    : WholeGradients(all_in_one(parameters.size()), std::move(names), std::move(rank_alone),
                     options,
                     {[](size_t) { return WorkPtr(); }, "a rank took gradient", "",
                      /*awaits_all=*/false}),
      parameters_(std::move(parameters)),
      shard_sums_(shards(), std::vector<at::Tensor>(parameters_.size())) {}

/// Adds to the first shard those before `end`, which are complete.
void LocalGradients::add_shards(size_t index, int end) {
  at::Tensor& total = shard_sums_[0][index];
  for (int shard = 1; shard < end; ++shard) {
    at::Tensor sum = std::exchange(shard_sums_[shard][index], at::Tensor());
    if (!sum.defined()) continue;
    total.defined() ? total.add_(sum) : total = std::move(sum);
  }
}

/// Where gradients of a shard are added, once it has begun. Those before it get no more, if the
/// step is the last that adds up.
at::Tensor& LocalGradients::sum_of(int shard, size_t index) {
  if (reduces()) add_shards(index, shard);
  return shard_sums_[shard][index];
}

void LocalGradients::accumulate(int shard, size_t index, at::Tensor gradient, bool first,
                                core::TensorUpdates& updates) {
  at::Tensor& sum = sum_of(shard, index);
  if (!first) {
    updates.add(sum, gradient);
    return;
  }
  gradient = taken(std::move(gradient));
  if (may_become_sum(gradient, parameters_[index])) {
    sum = with_strides_of(parameters_[index], gradient);
  } else {
    sum = empty_for(parameters_[index]);
    updates.copy(sum, gradient);
  }
}

at::Tensor LocalGradients::buffer(size_t index, int microbatch) {
  const int shard = shard_of(microbatch);
  at::Tensor& sum = sum_of(shard, index);
  if (begin(shard, index)) sum = empty_for(parameters_[index]).zero_();
  return sum;
}

/// Adds up all shards.
StepGradients::Reduced LocalGradients::reduced(size_t index) {
  add_shards(index, shards());
  at::Tensor sum = std::exchange(shard_sums_[0][index], at::Tensor());
  // A shard without a gradient has zeros, which counts where the others have -0.
  for (int shard = 0; shard < shards(); ++shard) {
    if (!has_sum(shard, index)) sum.add_(0);
  }
  return {std::move(sum), parameters_[index].scalar_type(), /*overwrites=*/true};
}

void LocalGradients::publish(size_t index, const at::Tensor& mean, core::TensorUpdates& updates) {
  add_to_grad(parameters_[index], mean, updates);
}

}  // namespace smp::dp
