// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <ostream>
#include <tuple>

#include "smp/export.h"
#include "smp/nn/parallel_linear.h"
#include "smp/nn/transformer_options.h"

namespace smp::nn {

/// Attention, a linear layer, dropout, and the residual:
///
///   y = x + dropout(dense(attention(pre_layernorm(x))));  layernorm(y) with post_layernorm
///
/// The heads are divided among the ranks of the tensor-parallel group. Scores are multiplied by
/// 1 / sqrt(attention_head_size). Where nothing is dropped from the probabilities (in evaluation,
/// or without attention_dropout_prob) and the options allow it, they are computed by libtorch's
/// `scaled_dot_product_attention`. The submodules are "query_key_value" (queries, keys and values,
/// one after the other) or, with cross attention, "query" and "key_value"; "dense";
/// "pre_layernorm" and "layernorm".
///
/// Throws `UsageError` if the ranks do not divide the heads, without any layer norm, for
/// query_key_layer_scaling without layer_idx, and for a sequence longer than causal_mask_size.
class SMP_API DistributedAttentionLayerImpl
    : public torch::nn::Cloneable<DistributedAttentionLayerImpl> {
 public:
  explicit DistributedAttentionLayerImpl(const DistributedAttentionLayerOptions& options = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// (hidden states [N, S, H], mask): the new hidden states. The mask, [N, 1, 1, S] or of sizes
  /// that broadcast to [N, 1, S, S], is added to the scores of all heads; it may be undefined.
  at::Tensor forward(const std::tuple<at::Tensor, at::Tensor>& inputs);
  /// Takes, with cross attention, (hidden states [N, S1, H], cross states [N, S2, H], mask [N, 1,
  /// 1, S2]).
  at::Tensor forward(const std::tuple<at::Tensor, at::Tensor, at::Tensor>& inputs);

  /// Does the same as forward(), with hidden states as they are between layers: with `sliced` this
  /// rank's part of the sequence. The cross states are whole; undefined without cross attention.
  at::Tensor run(const at::Tensor& hidden, const at::Tensor& cross, const at::Tensor& mask,
                 bool sliced);

  DistributedAttentionLayerOptions options;
  ColumnParallelLinear query_key_value{nullptr}, query{nullptr}, key_value{nullptr};
  RowParallelLinear dense{nullptr};
  torch::nn::LayerNorm pre_layernorm{nullptr}, layernorm{nullptr};

 private:
  at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const at::Tensor& mask);
  at::Tensor attend_in_fp32(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& mask);
  at::Tensor score_bias(const at::Tensor& query, int64_t keys, const at::Tensor& mask) const;
};
TORCH_MODULE(DistributedAttentionLayer);

}  // namespace smp::nn
