// SPDX-License-Identifier: Apache-2.0
#include "smp/nn/flash_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/check.h"
#include "nn/tensor_group.h"
#include "smp/nn/transformer_parts.h"

namespace smp::nn {

FlashAttentionLayerImpl::FlashAttentionLayerImpl(const FlashAttentionLayerOptions& options_)
    : options(options_) {
  SMP_CHECK_WITH(UsageError, !options.scale_attn_by_layer_idx() || options.layer_idx(),
                 "FlashAttentionLayer: scale_attn_by_layer_idx needs layer_idx, the number of the "
                 "layer from 0. Set it");
}

void FlashAttentionLayerImpl::pretty_print(std::ostream& stream) const {
  stream << "smp::nn::FlashAttentionLayer(attention_dropout_prob="
         << options.attention_dropout_prob() << ")";
}

double FlashAttentionLayerImpl::scale_of(int64_t channels) const {
  if (options.scale()) return *options.scale();
  double scale =
      options.scale_attention_scores() ? 1 / std::sqrt(static_cast<double>(channels)) : 1;
  if (options.scale_attn_by_layer_idx()) scale /= static_cast<double>(*options.layer_idx() + 1);
  return scale;
}

at::Tensor FlashAttentionLayerImpl::forward(const at::Tensor& qkv, const at::Tensor& mask,
                                            bool causal) {
  const bool fits = qkv.dim() == 5 && qkv.size(2) == 3 &&
                    qkv.size(4) == options.attention_head_size().value_or(qkv.size(4));
  SMP_CHECK_WITH(UsageError, fits, "FlashAttentionLayer: expected [N, S, 3, heads, ",
                 options.attention_head_size() ? std::to_string(*options.attention_head_size())
                                               : std::string("channels"),
                 "], got ", qkv.sizes(), ". Stack queries, keys and values along dimension 2");
  const std::vector<at::Tensor> parts = qkv.permute({2, 0, 3, 1, 4}).unbind(0);
  const at::Tensor& query = parts[0];
  const int64_t length = query.size(2);
  at::Tensor bias = mask.defined() ? mask.to(query.scalar_type()) : at::Tensor();
  const auto add = [&](const at::Tensor& term) { bias = bias.defined() ? bias + term : term; };
  if (options.use_alibi()) {
    const int64_t heads = query.size(1) * tensor_group()->size();
    add(score_biases(query, length, heads, options.alibi_bias_max()));
  }
  const double dropout = is_training() ? options.attention_dropout_prob() : 0;
  const double scale = scale_of(query.size(3));
  const bool masks = causal && (bias.defined() || dropout > 0);
  if (masks) {
    add(at::full({length, length}, -std::numeric_limits<double>::infinity(),
                 query.options().requires_grad(false))
            .triu(1));
  }
  if (dropout > 0) {
    return attention_in_steps(query, parts[1], parts[2], bias, {scale, dropout});
  }
  return at::scaled_dot_product_attention(query, parts[1], parts[2],
                                          bias.defined() ? std::optional(bias) : std::nullopt,
                                          /*dropout_p=*/0, causal && !masks, scale);
}

}  // namespace smp::nn
