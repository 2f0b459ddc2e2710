// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <map>
#include <optional>
#include <ostream>
#include <string>

#include "smp/export.h"
#include "smp/nn/split_module.h"

namespace smp::nn {

/// Options of `VocabParallelEmbedding`. Sizes are those of the whole.
struct VocabParallelEmbeddingOptions {
  VocabParallelEmbeddingOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {}

  TORCH_ARG(int64_t, num_embeddings);
  TORCH_ARG(int64_t, embedding_dim);
  /// The row that starts as zeros and gets no gradient; counted from the end if negative.
  TORCH_ARG(std::optional<int64_t>, padding_idx) = std::nullopt;
  /// Whether gradients are divided by how often an index occurs in the input.
  TORCH_ARG(bool, scale_grad_by_freq) = false;
  /// Standard deviation of the normal distribution that the weight is drawn from; 1 as in
  /// `torch::nn::Embedding`.
  TORCH_ARG(double, init_std) = 1;
};

/// Options of `DistributedEmbedding`. Sizes are those of the whole.
struct DistributedEmbeddingOptions {
  DistributedEmbeddingOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {}

  TORCH_ARG(int64_t, num_embeddings);
  TORCH_ARG(int64_t, embedding_dim);
  TORCH_ARG(std::optional<int64_t>, padding_idx) = std::nullopt;
  /// Rows that are looked up and have a larger norm are scaled to this one first, in the weight:
  /// for one replica, since another would scale others.
  TORCH_ARG(std::optional<double>, max_norm) = std::nullopt;
  /// Which norm: finite and above 0.
  TORCH_ARG(double, norm_type) = 2;
  TORCH_ARG(bool, scale_grad_by_freq) = false;
  /// Gradients are dense all the same, as those of every embedding in a step.
  TORCH_ARG(bool, sparse) = false;
  /// Standard deviation of the normal distribution that the weight is drawn from.
  TORCH_ARG(double, initializer_range) = 0.02;
  /// The whole weight [num_embeddings, embedding_dim] to begin with, instead of drawn values.
  TORCH_ARG(at::Tensor, _weight);
};

/// The common part of the layers below: ranks of the tensor-parallel group divide `weight` along
/// the dimension that `Options` is made for.
template <class Derived, class Options>
class SMP_API DividedEmbedding : public torch::nn::Cloneable<Derived>, public SplitModule {
 public:
  explicit DividedEmbedding(const Options& options);

  /// Registers the weight anew, for the group of now, and draws it.
  void reset() override;
  /// Draws the values of the whole, as `torch::nn::Embedding` does, and keeps this rank's.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  /// Looks up whole indices. All ranks of the group call it together.
  at::Tensor forward(const at::Tensor& indices);
  std::map<std::string, ParameterSplit> split_parameters() const override;

  Options options;
  at::Tensor weight;

 private:
  int ranks_ = 1;
};

/// An embedding whose vocabulary is divided among the ranks of the tensor-parallel group: rank r
/// has rows of `weight` [num_embeddings / ranks, embedding_dim]. Input indices of the whole, any
/// shape; output [..., embedding_dim] whole. A tied vocabulary head needs `weight`. It begins with
/// the values that `torch::nn::Embedding` draws from the same generator. Throws `UsageError` if
/// num_embeddings is no multiple of the ranks.
class SMP_API VocabParallelEmbeddingImpl
    : public DividedEmbedding<VocabParallelEmbeddingImpl, VocabParallelEmbeddingOptions> {
 public:
  VocabParallelEmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim)
      : DividedEmbedding(VocabParallelEmbeddingOptions(num_embeddings, embedding_dim)) {}
  using DividedEmbedding::DividedEmbedding;
};
TORCH_MODULE(VocabParallelEmbedding);

/// Takes the place of a `torch::nn::Embedding`: the channels of each embedding are divided among
/// the ranks of the tensor-parallel group, and the output is gathered. Rank r has columns of
/// `weight` [num_embeddings, embedding_dim / ranks]. Throws `UsageError` if embedding_dim is no
/// multiple of the ranks, and for another `norm_type`.
class SMP_API DistributedEmbeddingImpl
    : public DividedEmbedding<DistributedEmbeddingImpl, DistributedEmbeddingOptions> {
 public:
  DistributedEmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim)
      : DividedEmbedding(DistributedEmbeddingOptions(num_embeddings, embedding_dim)) {}
  using DividedEmbedding::DividedEmbedding;
};
TORCH_MODULE(DistributedEmbedding);

}  // namespace smp::nn
