// SPDX-License-Identifier: Apache-2.0
#include "smp/nn/parallel_embedding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_renorm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <torch/nn/init.h>

#include <cmath>
#include <memory>

#include "core/check.h"
#include "nn/initialization.h"
#include "nn/tensor_group.h"
#include "smp/leaf.h"
#include "smp/nn/operators.h"

namespace smp::nn {
namespace {

/// Counted from the start. Throws `UsageError` for a row that does not exist.
std::optional<int64_t> checked_padding(const char* module, std::optional<int64_t> padding_idx,
                                       int64_t num_embeddings) {
  if (!padding_idx) return padding_idx;
  SMP_CHECK_WITH(UsageError, *padding_idx >= -num_embeddings && *padding_idx < num_embeddings,
                 module, ": padding_idx ", *padding_idx, " is none of the ", num_embeddings,
                 " embeddings");
  return *padding_idx < 0 ? *padding_idx + num_embeddings : *padding_idx;
}

/// Draws as `torch::nn::Embedding` does.
void draw_rows(const at::Tensor& weight, const ParameterSplit& split, double std,
               std::optional<int64_t> padding_idx) {
  draw_part(weight, split, tensor_group()->rank(), [&](const at::Tensor& whole) {
    torch::nn::init::normal_(whole, 0, std);
    if (padding_idx) whole.select(0, *padding_idx).fill_(0);
  });
}

void print_sizes(std::ostream& stream, const char* module, int64_t num_embeddings,
                 int64_t embedding_dim, std::optional<int64_t> padding_idx, int ranks) {
  stream << "smp::nn::" << module << "(num_embeddings=" << num_embeddings
         << ", embedding_dim=" << embedding_dim;
  if (padding_idx) stream << ", padding_idx=" << *padding_idx;
  stream << ", ranks=" << ranks << ")";
}

/// A user of the weight of a `DistributedEmbedding`.
struct RowUser : torch::nn::Module {
  RowUser(const at::Tensor& weight_, const DistributedEmbeddingOptions& options_)
      : weight(register_parameter("weight", weight_, weight_.requires_grad())), options(options_) {}

  at::Tensor weight;
  DistributedEmbeddingOptions options;
};

/// The amount that this rank's part of each looked-up row adds to the power of its norm.
struct RowPowers final : RowUser {
  using RowUser::RowUser;
  at::Tensor forward(const at::Tensor& indices) {
    const at::NoGradGuard no_grad;
    return at::embedding(weight, indices).abs().pow(options.norm_type()).sum(-1);
  }
};

/// Scales the rows that are looked up and too long, as `torch::nn::Embedding` does.
struct ShortenedRows final : RowUser {
  using RowUser::RowUser;

  /// `powers` of the norms of whole rows; undefined if this rank has them whole.
  at::Tensor forward(const at::Tensor& indices, const at::Tensor& powers) {
    {
      const at::NoGradGuard no_grad;
      if (powers.defined()) {
        scale(indices.flatten().to(at::kLong),
              powers.flatten().to(at::kDouble).pow(1 / options.norm_type()));
      } else {
        at::embedding_renorm_(weight, indices, *options.max_norm(), options.norm_type());
      }
    }
    return at::embedding(weight, indices, options.padding_idx().value_or(-1),
                         options.scale_grad_by_freq());
  }

  /// A row that is there several times is written with the same values.
  void scale(const at::Tensor& indices, const at::Tensor& norms) {
    const double max_norm = *options.max_norm();
    const at::Tensor factors = at::where(norms > max_norm, max_norm / (norms + 1e-7), 1.0);
    const at::Tensor rows = weight.index_select(0, indices);
    weight.index_copy_(0, indices, rows * factors.to(rows.scalar_type()).unsqueeze(-1));
  }
};

}  // namespace

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(
    const VocabParallelEmbeddingOptions& options_)
    : options(options_) {
  VocabParallelEmbeddingImpl::reset();
}

std::map<std::string, ParameterSplit> VocabParallelEmbeddingImpl::split_parameters() const {
  return {{"weight", {{options.num_embeddings(), options.embedding_dim()}, 0, 1, ranks_}}};
}

void VocabParallelEmbeddingImpl::reset() {
  ranks_ = tensor_group()->size();
  check_divides("VocabParallelEmbedding", "num_embeddings", options.num_embeddings(), ranks_);
  options.padding_idx(
      checked_padding("VocabParallelEmbedding", options.padding_idx(), options.num_embeddings()));
  weight = register_parameter(
      "weight", at::empty({options.num_embeddings() / ranks_, options.embedding_dim()}));
  reset_parameters();
}

void VocabParallelEmbeddingImpl::reset_parameters() {
  draw_rows(weight, split_parameters().at("weight"), options.init_std(), options.padding_idx());
}

void VocabParallelEmbeddingImpl::pretty_print(std::ostream& stream) const {
  print_sizes(stream, "VocabParallelEmbedding", options.num_embeddings(), options.embedding_dim(),
              options.padding_idx(), ranks_);
}

at::Tensor VocabParallelEmbeddingImpl::forward(const at::Tensor& indices) {
  return reduce_from_group(divided_embedding(weight, indices, options.num_embeddings(),
                                             options.padding_idx().value_or(-1),
                                             options.scale_grad_by_freq()));
}

DistributedEmbeddingImpl::DistributedEmbeddingImpl(const DistributedEmbeddingOptions& options_)
    : options(options_) {
  DistributedEmbeddingImpl::reset();
}

std::map<std::string, ParameterSplit> DistributedEmbeddingImpl::split_parameters() const {
  return {{"weight", {{options.num_embeddings(), options.embedding_dim()}, 1, 1, ranks_}}};
}

void DistributedEmbeddingImpl::reset() {
  ranks_ = tensor_group()->size();
  check_divides("DistributedEmbedding", "embedding_dim", options.embedding_dim(), ranks_);
  const double norm_type = options.norm_type();
  SMP_CHECK_WITH(UsageError, !options.max_norm() || (std::isfinite(norm_type) && norm_type > 0),
                 "DistributedEmbedding: norm_type must be finite and above 0, got ", norm_type);
  options.padding_idx(
      checked_padding("DistributedEmbedding", options.padding_idx(), options.num_embeddings()));
  weight = register_parameter(
      "weight", at::empty({options.num_embeddings(), options.embedding_dim() / ranks_}));
  reset_parameters();
}

void DistributedEmbeddingImpl::reset_parameters() {
  const ParameterSplit split = split_parameters().at("weight");
  const at::Tensor& given = options._weight();
  if (!given.defined()) {
    draw_rows(weight, split, options.initializer_range(), options.padding_idx());
    return;
  }
  SMP_CHECK_WITH(UsageError, given.sizes() == at::IntArrayRef(split.sizes),
                 "DistributedEmbedding: the weight given has sizes ", given.sizes(),
                 ". Give the whole one, ", at::IntArrayRef(split.sizes));
  draw_part(weight, split, tensor_group()->rank(),
            [&](const at::Tensor& whole) { whole.copy_(given); });
}

void DistributedEmbeddingImpl::pretty_print(std::ostream& stream) const {
  print_sizes(stream, "DistributedEmbedding", options.num_embeddings(), options.embedding_dim(),
              options.padding_idx(), ranks_);
}

at::Tensor DistributedEmbeddingImpl::forward(const at::Tensor& indices) {
  const at::Tensor rows = options.max_norm()
                              ? shortened(indices)
                              : at::embedding(weight, indices, options.padding_idx().value_or(-1),
                                              options.scale_grad_by_freq());
  return gather_from_group(rows, -1);
}

/// The rows, after those that are too long were scaled. Only a leaf may write a parameter, and none
/// communicates: so one computes this rank's part of the norms, and another uses the sums.
at::Tensor DistributedEmbeddingImpl::shortened(const at::Tensor& indices) {
  at::Tensor powers;
  if (group_size() > 1) {
    powers = reduce_from_group(leaf(std::make_shared<RowPowers>(weight, options))(indices));
  }
  const auto rows = std::make_shared<ShortenedRows>(weight, options);
  return leaf(rows, LeafWrites::kParametersByBatch)(indices, powers);
}

}  // namespace smp::nn
