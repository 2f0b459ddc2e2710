// SPDX-License-Identifier: Apache-2.0
// smp::tp_embedding.

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "core/check.h"
#include "nn/operator_call.h"
#include "nn/tensor_group.h"

namespace smp::nn {
namespace {

using at::Tensor;

void check(const Tensor& weight, const Tensor& indices, int64_t num_embeddings, int ranks) {
  SMP_CHECK_WITH(UsageError, weight.dim() == 2 && weight.size(0) * ranks == num_embeddings,
                 "smp::tp_embedding: a weight of sizes ", weight.sizes(), " on each of ", ranks,
                 " ranks is not a vocabulary of ", num_embeddings,
                 ". Every rank holds num_embeddings / ranks rows: choose a number of embeddings "
                 "that the tensor_parallel_degree divides");
  if (!indices.is_cpu() || indices.numel() == 0) return;
  const int64_t low = indices.min().item<int64_t>(), high = indices.max().item<int64_t>();
  SMP_CHECK_WITH(UsageError, low >= 0 && high < num_embeddings, "smp::tp_embedding: indices from ",
                 low, " to ", high, " in a vocabulary of ", num_embeddings,
                 ". Indices start at 0 and must be less than num_embeddings");
}

Tensor embedding(const Tensor& weight, const Tensor& indices, int64_t num_embeddings, int64_t,
                 bool) {
  const auto group = tensor_group();
  check(weight, indices, num_embeddings, group->size());
  if (weight.is_meta()) {
    std::vector<int64_t> sizes = indices.sizes().vec();
    sizes.push_back(weight.size(1));
    return at::empty(sizes, weight.options());
  }
  const int64_t rows = weight.size(0);
  const Tensor local = indices - group->rank() * rows;
  const Tensor elsewhere = local.lt(0).logical_or_(local.ge(rows));
  return at::embedding(weight, local.clamp(0, rows - 1)).masked_fill_(elsewhere.unsqueeze(-1), 0);
}

/// One row more stands for all that gets no gradient here: the rows of other ranks, and padding.
Tensor embedding_backward(const Tensor& gradient, const Tensor& indices, int64_t first,
                          int64_t rows, int64_t padding_idx, bool scale_grad_by_freq) {
  const Tensor local = indices - first;
  const Tensor none = local.lt(0).logical_or_(local.ge(rows)).logical_or_(indices.eq(padding_idx));
  return at::embedding_dense_backward(gradient, local.masked_fill(none, rows), rows + 1,
                                      /*padding_idx=*/rows, scale_grad_by_freq)
      .narrow(0, 0, rows);
}

using Signature = Tensor(const Tensor&, const Tensor&, int64_t, int64_t, bool);

struct Embedding : torch::autograd::Function<Embedding> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& weight,
                        const Tensor& indices, int64_t num_embeddings, int64_t padding_idx,
                        bool scale_grad_by_freq) {
    context->save_for_backward({indices});
    context->saved_data["first"] = tensor_group()->rank() * weight.size(0);
    context->saved_data["rows"] = weight.size(0);
    context->saved_data["padding_idx"] = padding_idx;
    context->saved_data["scale_grad_by_freq"] = scale_grad_by_freq;
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = typed_operator<Signature>("smp::tp_embedding");
    return op.call(weight, indices, num_embeddings, padding_idx, scale_grad_by_freq);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto& saved = context->saved_data;
    const Tensor indices = context->get_saved_variables()[0];
    return {embedding_backward(gradients[0], indices, saved["first"].toInt(), saved["rows"].toInt(),
                               saved["padding_idx"].toInt(), saved["scale_grad_by_freq"].toBool()),
            Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor embedding_autograd(const Tensor& weight, const Tensor& indices, int64_t num_embeddings,
                          int64_t padding_idx, bool scale_grad_by_freq) {
  return Embedding::apply(weight, indices, num_embeddings, padding_idx, scale_grad_by_freq);
}

TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "tp_embedding(Tensor weight, Tensor indices, int num_embeddings, int padding_idx,"
      " bool scale_grad_by_freq) -> Tensor");
}

TORCH_LIBRARY_IMPL(smp, CompositeExplicitAutograd, m) { m.impl("tp_embedding", &embedding); }

TORCH_LIBRARY_IMPL(smp, Autograd, m) { m.impl("tp_embedding", &embedding_autograd); }

}  // namespace
}  // namespace smp::nn
