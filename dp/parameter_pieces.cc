// SPDX-License-Identifier: Apache-2.0
#include "dp/parameter_pieces.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "graph/absent.h"

namespace smp::dp {
namespace {

graph::AbsencePtr absence_of(const std::string& name) {
  graph::Absence absence;
  absence.what = ".grad of parameter \"" + name + "\", which is in pieces on the replicas";
  absence.remedy =
      "With \"shard_optimizer_state\" or \"sharded_data_parallel_degree\" read and change the "
      "pieces "
      "of this rank: .grad of model->virtual_named_parameters(). Norms over all gradients are "
      "smp::grad_norm(model) and smp::clip_grad_norm_(model, max_norm), and optimizer.zero_grad() "
      "drops gradients";
  absence.ignores_writes = false;
  return std::make_shared<graph::Absence>(std::move(absence));
}

}  // namespace

ParameterPieces::ParameterPieces(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                 comm::CommunicatorPtr group, int64_t bucket_bytes)
    : own_(parameters.size()),
      parameters_(std::move(parameters)),
      names_(std::move(names)),
      group_(std::move(group)),
      layout_(make_bucket_layout(parameters_, sum_options(parameters_),
                                 reverse_order(parameters_.size()),
                                 {bucket_bytes, bucket_bytes, group_->size()})),
      markers_(parameters_.size()),
      gathered_writes_(parameters_.size()) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto [begin, end] = owned(i);
    if (begin < end) own_[i] = at::empty({0}, parameters_[i].options()).requires_grad_();
  }
  bind();
}

size_t ParameterPieces::add(const at::Tensor& parameter, const std::string& name) {
  const size_t index = parameters_.size();
  const BucketLayout alone =
      make_bucket_layout({parameter}, {sum_options(parameter)}, {0}, {1, 1, group_->size()});
  parameters_.push_back(parameter);
  names_.push_back(name);
  layout_.members.push_back({index});
  layout_.numel.push_back(alone.numel.front());
  layout_.options.push_back(alone.options.front());
  layout_.slots.push_back({index, 0});
  own_.emplace_back();
  markers_.emplace_back();
  gathered_writes_.emplace_back();
  return index;
}

comm::Range ParameterPieces::range(size_t index) const {
  const auto [bucket, offset] = layout_.slots[index];
  return {offset, layout_.numel[bucket] / group_->size()};
}

at::Tensor ParameterPieces::in_part(const at::Tensor& part, size_t index) const {
  const auto [begin, end] = owned(index);
  const auto [offset, length] = range(index);
  return begin == end ? part.narrow(0, 0, 0)
                      : part.narrow(0, offset + begin - group_->rank() * length, end - begin);
}

at::Tensor ParameterPieces::flat(const at::Tensor& tensor, size_t index) const {
  return tensor.detach().permute(comm::memory_order(parameters_[index])).reshape({-1});
}

void ParameterPieces::bind() {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto [begin, end] = owned(i);
    if (begin < end) own_[i].set_data(flat(parameters_[i], i).slice(0, begin, end));
  }
}

void ParameterPieces::all_gather(const std::vector<bool>& updated) {
  at::NoGradGuard no_grad;
  const auto is_updated = [&](size_t i) { return updated[i]; };
  std::vector<at::Tensor> buckets(layout_.size());
  std::vector<WorkPtr> works(layout_.size());
  for (size_t b = 0; b < layout_.size(); ++b) {
    const auto& members = layout_.members[b];
    if (std::none_of(members.begin(), members.end(), is_updated)) continue;
    const auto dtype = parameters_[members.front()].scalar_type();
    buckets[b] = at::empty({layout_.numel[b]}, layout_.options[b].dtype(dtype));
    const at::Tensor mine = buckets[b].chunk(group_->size())[group_->rank()];
    for (size_t i : members) {
      if (own_[i].defined()) in_part(mine, i).copy_(own_[i]);
    }
    works[b] = group_->async().all_gather(as_real(buckets[b]), as_real(mine));
  }
  for (size_t b = 0; b < layout_.size(); ++b) {
    if (!buckets[b].defined()) continue;
    works[b]->wait();
    for (size_t i : layout_.members[b]) {
      const at::Tensor whole = gradient_slice(buckets[b], layout_.slots[i].offset, parameters_[i]);
      parameters_[i].detach().copy_(whole);
      gathered_writes_[i] = writes(i);
    }
    buckets[b].reset();
  }
}

int64_t ParameterPieces::writes(size_t index) const {
  const at::Tensor& own = own_[index];
  return own.defined() && !own.is_inference() ? own._version() : 0;
}

void ParameterPieces::add_gradient(size_t index, const at::Tensor& gradient) {
  const at::Tensor& parameter = parameters_[index];
  if (!has_gradient(index)) {
    markers_[index] = graph::make_absent_like(parameter, absence_of(names_[index]));
    parameter.mutable_grad() = markers_[index];
  }
  if (!own_[index].defined()) return;
  at::NoGradGuard no_grad;
  at::Tensor& sum = own_[index].mutable_grad();
  if (sum.defined()) {
    sum.add_(gradient);
  } else {
    sum = gradient;
  }
}

bool ParameterPieces::has_gradient(size_t index) {
  const at::Tensor& given = parameters_[index].grad();
  if (!given.defined()) {
    if (own_[index].defined()) own_[index].mutable_grad().reset();
    return false;
  }
  SMP_CHECK_WITH(UsageError, given.is_same(markers_[index]),
                 "the program has changed .grad of parameter \"", names_[index],
                 "\", which holds no numbers: each replica has a piece of the gradient (see "
                 "docs/memory.md). Change .grad of model->virtual_named_parameters() instead, "
                 "and drop gradients with optimizer.zero_grad() or model->zero_grad()");
  return true;
}

}  // namespace smp::dp
