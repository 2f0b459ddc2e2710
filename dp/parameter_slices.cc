// SPDX-License-Identifier: Apache-2.0
#include "dp/parameter_slices.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

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

ParameterSlices::ParameterSlices(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                 comm::CommunicatorPtr group, int64_t bucket_bytes)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      group_(std::move(group)),
      layout_(make_bucket_layout(parameters_, sum_options(parameters_),
                                 reverse_order(parameters_.size()),
                                 {bucket_bytes, bucket_bytes, group_->size()})),
      markers_(parameters_.size()) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    index_of_.emplace(parameters_[i].unsafeGetTensorImpl(), i);
    Piece piece = piece_of(i, group_->rank());
    if (piece.numel() > 0) {
      piece.tensor = at::empty({0}, parameters_[i].options()).requires_grad_();
    }
    pieces_.push_back(std::move(piece));
  }
  bind();
}

int64_t ParameterSlices::part_length(const at::Tensor& parameter, int replicas) {
  const BucketLayout layout =
      make_bucket_layout({parameter}, {sum_options(parameter)}, {0}, {1, 1, replicas});
  return layout.numel.front() / replicas;
}

size_t ParameterSlices::add(const at::Tensor& parameter, const std::string& name,
                            const at::Tensor& piece) {
  const size_t index = parameters_.size();
  index_of_.emplace(parameter.unsafeGetTensorImpl(), index);
  parameters_.push_back(parameter);
  names_.push_back(name);
  layout_.members.push_back({index});
  layout_.numel.push_back(part_length(parameter, group_->size()) * group_->size());
  layout_.options.push_back(sum_options(parameter));
  layout_.slots.push_back({index, 0});
  pieces_.push_back(piece_of(index, group_->rank()));
  if (pieces_.back().numel() > 0) pieces_.back().tensor = piece;
  markers_.emplace_back();
  return index;
}

ParameterSlices::Piece ParameterSlices::piece_of(size_t index, int replica) const {
  const auto [bucket, offset] = layout_.slots[index];
  const int64_t part = layout_.numel[bucket] / group_->size();
  const int64_t numel = parameters_[index].numel();
  const int64_t begin = std::clamp<int64_t>(replica * part - offset, 0, numel);
  const int64_t end = std::clamp<int64_t>((replica + 1) * part - offset, 0, numel);
  if (begin == end) return {};
  return {begin, end, offset + begin - replica * part, {}};
}

std::optional<size_t> ParameterSlices::find(const at::Tensor& parameter) const {
  const auto found = index_of_.find(parameter.unsafeGetTensorImpl());
  return found == index_of_.end() ? std::nullopt : std::optional(found->second);
}

at::Tensor ParameterSlices::part(const at::Tensor& flat) const {
  const int64_t numel = flat.numel() / group_->size();
  return flat.narrow(0, group_->rank() * numel, numel);
}

at::Tensor ParameterSlices::elements(const at::Tensor& tensor, size_t index,
                                     const Piece& piece) const {
  const at::Tensor& parameter = parameters_[index];
  at::Tensor data = tensor.detach();
  if (!parameter.is_non_overlapping_and_dense()) {
    return data.reshape({-1}).slice(0, piece.begin, piece.end);
  }
  if (data.strides() != parameter.strides()) {
    // Not `empty_like`: the parameter may be absent.
    data = at::empty_strided(parameter.sizes(), parameter.strides(), data.options()).copy_(data);
  }
  return data.as_strided({piece.numel()}, {1}, data.storage_offset() + piece.begin);
}

at::Tensor ParameterSlices::place(const at::Tensor& flat, size_t index) const {
  return gradient_slice(flat, layout_.slots[index].offset, parameters_[index]);
}

at::Tensor ParameterSlices::pack(size_t bucket, at::ScalarType dtype,
                                 const std::function<at::Tensor(size_t index)>& value) const {
  at::NoGradGuard no_grad;
  const at::Tensor flat = at::empty({layout_.numel[bucket]}, layout_.options[bucket].dtype(dtype));
  const at::Tensor mine = part(flat);
  for (size_t i : layout_.members[bucket]) {
    const Piece& piece = pieces_[i];
    const at::Tensor given = piece.numel() > 0 ? value(i) : at::Tensor();
    if (given.defined()) mine.narrow(0, piece.offset, piece.numel()).copy_(given);
  }
  return flat;
}

at::Tensor ParameterSlices::gather_bucket(size_t bucket, at::ScalarType dtype,
                                          const std::function<at::Tensor(size_t index)>& value,
                                          int root) const {
  at::Tensor flat = pack(bucket, dtype, value);
  const at::Tensor all = group_->rank() == root ? flat : at::Tensor();
  group_->gather(all.defined() ? as_real(all) : all, as_real(part(flat)), root);
  return all;
}

void ParameterSlices::bind() {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Piece& piece = pieces_[i];
    if (piece.numel() > 0) piece.tensor.set_data(elements(parameters_[i], i, piece));
  }
}

void ParameterSlices::all_gather(const std::vector<bool>& updated) {
  at::NoGradGuard no_grad;
  const auto is_updated = [&](size_t i) { return updated[i]; };
  std::vector<at::Tensor> buckets(layout_.size());
  std::vector<WorkPtr> works(layout_.size());
  for (size_t b = 0; b < layout_.size(); ++b) {
    const auto& members = layout_.members[b];
    if (std::none_of(members.begin(), members.end(), is_updated)) continue;
    buckets[b] = pack(b, parameters_[members.front()].scalar_type(),
                      [&](size_t i) { return pieces_[i].tensor; });
    works[b] = group_->async().all_gather(as_real(buckets[b]), as_real(part(buckets[b])));
  }
  for (size_t b = 0; b < layout_.size(); ++b) {
    if (!buckets[b].defined()) continue;
    works[b]->wait();
    for (size_t i : layout_.members[b]) parameters_[i].detach().copy_(place(buckets[b], i));
    buckets[b].reset();
  }
}

void ParameterSlices::add_gradient(size_t index, const at::Tensor& gradient) {
  const at::Tensor& parameter = parameters_[index];
  if (!has_gradient(index)) {
    markers_[index] = graph::make_absent_like(parameter, absence_of(names_[index]));
    parameter.mutable_grad() = markers_[index];
  }
  const Piece& piece = pieces_[index];
  if (piece.numel() == 0) return;
  at::NoGradGuard no_grad;
  at::Tensor& sum = piece.tensor.mutable_grad();
  if (sum.defined()) {
    sum.add_(gradient);
  } else {
    sum = gradient;
  }
}

bool ParameterSlices::has_gradient(size_t index) {
  const at::Tensor& given = parameters_[index].grad();
  if (!given.defined()) {
    if (pieces_[index].numel() > 0) pieces_[index].tensor.mutable_grad().reset();
    return false;
  }
  SMP_CHECK_WITH(UsageError, given.is_same(markers_[index]),
                 "the program has changed .grad of parameter \"", names_[index],
                 "\", which holds no numbers: each replica has a piece of the gradient (see "
                 "docs/sharding.md). Change .grad of model->virtual_named_parameters() instead, "
                 "and drop gradients with optimizer.zero_grad() or model->zero_grad()");
  return true;
}

}  // namespace smp::dp
