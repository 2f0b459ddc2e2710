// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <ostream>
#include <tuple>

#include "smp/export.h"
#include "smp/nn/attention_layer.h"
#include "smp/nn/parallel_linear.h"
#include "smp/nn/transformer_options.h"

namespace smp::nn {

/// The second half of a transformer layer, whose intermediate channels are divided among the ranks
/// of the tensor-parallel group:
///
///   y = x + dropout(dense2(activation(dense1(pre_layernorm(x)))));  layernorm(y) with
///   post_layernorm
///
/// Throws `UsageError` if the ranks do not divide intermediate_size, without any layer norm, and
/// for an activation other than "gelu", "gelu_new" and "relu".
class SMP_API DistributedTransformerOutputLayerImpl
    : public torch::nn::Cloneable<DistributedTransformerOutputLayerImpl> {
 public:
  explicit DistributedTransformerOutputLayerImpl(
      const DistributedTransformerOutputLayerOptions& options = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Hidden states [N, S, H] to hidden states.
  at::Tensor forward(const at::Tensor& hidden);
  /// The same with hidden states as they are between layers: with `sliced` this rank's part of the
  /// sequence.
  at::Tensor run(const at::Tensor& hidden, bool sliced);

  DistributedTransformerOutputLayerOptions options;
  ColumnParallelLinear dense1{nullptr};
  RowParallelLinear dense2{nullptr};
  torch::nn::LayerNorm pre_layernorm{nullptr}, layernorm{nullptr};
};
TORCH_MODULE(DistributedTransformerOutputLayer);

/// "attention", with add_cross_attention "cross_attention", then "output".
class SMP_API DistributedTransformerLayerImpl
    : public torch::nn::Cloneable<DistributedTransformerLayerImpl> {
 public:
  using Pair = std::tuple<at::Tensor, at::Tensor>;
  using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

  explicit DistributedTransformerLayerImpl(const DistributedTransformerLayerOptions& options = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// (hidden states [N, S, H], attention mask [N, 1, 1, S]) to (hidden states, the same mask), so
  /// that layers can follow each other. The mask is added to scores; it may be undefined.
  Pair forward(const Pair& inputs);
  /// Maps, with add_cross_attention, (hidden states [N, S1, H], cross states [N, S2, H], attention
  /// mask [N, 1, 1, S1], cross mask [N, 1, 1, S2]) to the same with new hidden states.
  Four forward(const Four& inputs);
  /// The new hidden states, as they are between layers: with `sliced` this rank's part of the
  /// sequence.
  at::Tensor run(const at::Tensor& hidden, const at::Tensor& cross, const at::Tensor& mask,
                 const at::Tensor& cross_mask, bool sliced);

  DistributedTransformerLayerOptions options;
  DistributedAttentionLayer attention{nullptr}, cross_attention{nullptr};
  DistributedTransformerOutputLayer output{nullptr};
};
TORCH_MODULE(DistributedTransformerLayer);

/// `num_layers` layers, one after the other, in the list "seq_layers". With `optimize("memory")`
/// the hidden states are divided along the sequence from the first layer to the last.
class SMP_API DistributedTransformerImpl : public torch::nn::Cloneable<DistributedTransformerImpl> {
 public:
  using Pair = DistributedTransformerLayerImpl::Pair;
  using Four = DistributedTransformerLayerImpl::Four;

  explicit DistributedTransformerImpl(const DistributedTransformerOptions& options = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// See the same function of `DistributedTransformerLayer`.
  Pair forward(const Pair& inputs);
  Four forward(const Four& inputs);
  at::Tensor run(at::Tensor hidden, const at::Tensor& cross, const at::Tensor& mask,
                 const at::Tensor& cross_mask, bool sliced);

  DistributedTransformerOptions options;
  torch::nn::ModuleList seq_layers{nullptr};
};
TORCH_MODULE(DistributedTransformer);

}  // namespace smp::nn
