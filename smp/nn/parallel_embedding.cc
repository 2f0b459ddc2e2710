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

/// The rows, after those that are too long were scaled. Only a leaf may write a parameter, and none
/// communicates: so one computes this rank's part of the norms, and another uses the sums.
at::Tensor shortened(const DistributedEmbeddingOptions& options, const at::Tensor& weight,
                     const at::Tensor& indices) {
  at::Tensor powers;
  if (group_size() > 1) {
    powers = reduce_from_group(leaf(std::make_shared<RowPowers>(weight, options))(indices));
  }
  const auto rows = std::make_shared<ShortenedRows>(weight, options);
  return leaf(rows, LeafWrites::kParametersByBatch)(indices, powers);
}

/// Draws as `torch::nn::Embedding` does.
void draw_rows(const at::Tensor& whole, double std, std::optional<int64_t> padding_idx) {
  torch::nn::init::normal_(whole, 0, std);
  if (padding_idx) whole.select(0, *padding_idx).fill_(0);
}

/// Its own name without "Impl" and the namespace, in errors and prints.
template <class Module>
constexpr const char* kEmbeddingName = "";
template <>
constexpr const char* kEmbeddingName<VocabParallelEmbeddingImpl> = "VocabParallelEmbedding";
template <>
constexpr const char* kEmbeddingName<DistributedEmbeddingImpl> = "DistributedEmbedding";

ParameterSplit table_split(const VocabParallelEmbeddingOptions& options, int ranks) {
  return {{options.num_embeddings(), options.embedding_dim()}, 0, 1, ranks};
}

void check_own(const VocabParallelEmbeddingOptions&) {}

void draw_table(const VocabParallelEmbeddingOptions& options, const at::Tensor& whole) {
  draw_rows(whole, options.init_std(), options.padding_idx());
}

at::Tensor rows_of(const VocabParallelEmbeddingOptions& options, const at::Tensor& weight,
                   const at::Tensor& indices) {
  return reduce_from_group(divided_embedding(weight, indices, options.num_embeddings(),
                                             options.padding_idx().value_or(-1),
                                             options.scale_grad_by_freq()));
}

ParameterSplit table_split(const DistributedEmbeddingOptions& options, int ranks) {
  return {{options.num_embeddings(), options.embedding_dim()}, 1, 1, ranks};
}

void check_own(const DistributedEmbeddingOptions& options) {
  const double norm_type = options.norm_type();
  SMP_CHECK_WITH(UsageError, !options.max_norm() || (std::isfinite(norm_type) && norm_type > 0),
                 "DistributedEmbedding: norm_type must be finite and above 0, got ", norm_type);
}

void draw_table(const DistributedEmbeddingOptions& options, const at::Tensor& whole) {
  const at::Tensor& given = options._weight();
  if (!given.defined()) return draw_rows(whole, options.initializer_range(), options.padding_idx());
  SMP_CHECK_WITH(UsageError, given.sizes() == whole.sizes(),
                 "DistributedEmbedding: the weight given has sizes ", given.sizes(),
                 ". Give the whole one, ", whole.sizes());
  whole.copy_(given);
}

at::Tensor rows_of(const DistributedEmbeddingOptions& options, const at::Tensor& weight,
                   const at::Tensor& indices) {
  const at::Tensor rows = options.max_norm()
                              ? shortened(options, weight, indices)
                              : at::embedding(weight, indices, options.padding_idx().value_or(-1),
                                              options.scale_grad_by_freq());
  return gather_from_group(rows, -1);
}

}  // namespace

template <class Derived, class Options>
DividedEmbedding<Derived, Options>::DividedEmbedding(const Options& options_) : options(options_) {
  DividedEmbedding::reset();
}

template <class Derived, class Options>
std::map<std::string, ParameterSplit> DividedEmbedding<Derived, Options>::split_parameters() const {
  return {{"weight", table_split(options, ranks_)}};
}

template <class Derived, class Options>
void DividedEmbedding<Derived, Options>::reset() {
  constexpr const char* name = kEmbeddingName<Derived>;
  ranks_ = tensor_group()->size();
  const ParameterSplit split = table_split(options, ranks_);
  check_divides(name, split.dim == 0 ? "num_embeddings" : "embedding_dim", split.sizes[split.dim],
                ranks_);
  check_own(options);
  options.padding_idx(checked_padding(name, options.padding_idx(), options.num_embeddings()));
  weight = this->register_parameter("weight", at::empty(split.local_sizes()));
  reset_parameters();
}

template <class Derived, class Options>
void DividedEmbedding<Derived, Options>::reset_parameters() {
  draw_part(weight, table_split(options, ranks_), tensor_group()->rank(),
            [&](const at::Tensor& whole) { draw_table(options, whole); });
}

template <class Derived, class Options>
void DividedEmbedding<Derived, Options>::pretty_print(std::ostream& stream) const {
  stream << "smp::nn::" << kEmbeddingName<Derived> << "(num_embeddings=" << options.num_embeddings()
         << ", embedding_dim=" << options.embedding_dim();
  if (options.padding_idx()) stream << ", padding_idx=" << *options.padding_idx();
  stream << ", ranks=" << ranks_ << ")";
}

template <class Derived, class Options>
at::Tensor DividedEmbedding<Derived, Options>::forward(const at::Tensor& indices) {
  return rows_of(options, weight, indices);
}

template class DividedEmbedding<VocabParallelEmbeddingImpl, VocabParallelEmbeddingOptions>;
template class DividedEmbedding<DistributedEmbeddingImpl, DistributedEmbeddingOptions>;

}  // namespace smp::nn
