// SPDX-License-Identifier: Apache-2.0
#include "smp/nn/operators.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>

#include "nn/operator_call.h"
#include "nn/tensor_group.h"

namespace smp::nn {
namespace {

using at::Tensor;

bool alone() { return tensor_group()->size() == 1; }

using OfTensor = Tensor(const Tensor&);
using OfDim = Tensor(const Tensor&, int64_t);
using OfTwoDims = Tensor(const Tensor&, int64_t, int64_t);

}  // namespace

int group_size() { return tensor_group()->size(); }

int group_rank() { return tensor_group()->rank(); }

Tensor copy_to_group(const Tensor& x) {
  static const auto op = typed_operator<OfTensor>("smp::tp_copy");
  return alone() ? x : op.call(x);
}

Tensor reduce_from_group(const Tensor& x) {
  static const auto op = typed_operator<OfTensor>("smp::tp_reduce");
  return alone() ? x : op.call(x);
}

Tensor scatter_to_group(const Tensor& x, int64_t dim, int64_t blocks) {
  static const auto op = typed_operator<OfTwoDims>("smp::tp_scatter");
  return alone() ? x : op.call(x, normal_dim("scatter_to_group", x, dim), blocks);
}

Tensor gather_from_group(const Tensor& x, int64_t dim, int64_t blocks) {
  static const auto op = typed_operator<OfTwoDims>("smp::tp_gather");
  return alone() ? x : op.call(x, normal_dim("gather_from_group", x, dim), blocks);
}

Tensor all_gather_to_group(const Tensor& x, int64_t dim) {
  static const auto op = typed_operator<OfDim>("smp::tp_all_gather");
  return alone() ? x : op.call(x, normal_dim("all_gather_to_group", x, dim));
}

Tensor reduce_scatter_from_group(const Tensor& x, int64_t dim) {
  static const auto op = typed_operator<OfDim>("smp::tp_reduce_scatter");
  return alone() ? x : op.call(x, normal_dim("reduce_scatter_from_group", x, dim));
}

Tensor gathered_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                       int64_t dim) {
  static const auto op =
      typed_operator<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t)>(
          "smp::tp_gathered_linear");
  if (alone()) return at::linear(x, weight, bias);
  return op.call(x, weight, bias, normal_dim("gathered_linear", x, dim));
}

Tensor all_to_all_in_group(const Tensor& x, int64_t split_dim, int64_t join_dim) {
  static const auto op = typed_operator<OfTwoDims>("smp::tp_all_to_all");
  if (alone()) return x;
  return op.call(x, normal_dim("all_to_all_in_group", x, split_dim),
                 normal_dim("all_to_all_in_group", x, join_dim));
}

Tensor divided_dropout(const Tensor& x, double p, bool train, int64_t dim, int64_t blocks) {
  static const auto op =
      typed_operator<Tensor(const Tensor&, double, bool, int64_t, int64_t)>("smp::tp_dropout");
  if (alone()) return at::dropout(x, p, train);
  return op.call(x, p, train, normal_dim("divided_dropout", x, dim), blocks);
}

Tensor divided_embedding(const Tensor& weight, const Tensor& indices, int64_t num_embeddings,
                         int64_t padding_idx, bool scale_grad_by_freq) {
  static const auto op =
      typed_operator<Tensor(const Tensor&, const Tensor&, int64_t, int64_t, bool)>(
          "smp::tp_embedding");
  if (alone()) return at::embedding(weight, indices, padding_idx, scale_grad_by_freq, false);
  return op.call(weight, indices, num_embeddings, padding_idx, scale_grad_by_freq);
}

Tensor divided_cross_entropy(const Tensor& logits, const Tensor& target,
                             const std::optional<Tensor>& weight, int64_t reduction,
                             int64_t ignore_index, double label_smoothing) {
  static const auto op =
      typed_operator<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t,
                            int64_t, double)>("smp::tp_cross_entropy");
  if (alone()) {
    return at::cross_entropy_loss(logits, target, weight, reduction, ignore_index, label_smoothing);
  }
  return op.call(logits, target, weight, reduction, ignore_index, label_smoothing);
}

}  // namespace smp::nn
