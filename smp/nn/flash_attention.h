// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <ostream>

#include "smp/export.h"

namespace smp::nn {

/// Options of `FlashAttentionLayer`.
struct FlashAttentionLayerOptions {
  /// Dropout of attention probabilities, in training.
  TORCH_ARG(double, attention_dropout_prob) = 0.1;
  /// Channels of one head, to be checked; none: as the input has.
  TORCH_ARG(std::optional<int64_t>, attention_head_size) = std::nullopt;
  /// Multiply scores by 1 / sqrt(channels).
  TORCH_ARG(bool, scale_attention_scores) = true;
  /// Divide scores by `layer_idx` + 1.
  TORCH_ARG(bool, scale_attn_by_layer_idx) = false;
  TORCH_ARG(std::optional<int64_t>, layer_idx) = std::nullopt;
  /// The factor of scores, instead of all that.
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;
  /// Attention with linear biases (arXiv 2108.12409).
  TORCH_ARG(bool, use_alibi) = false;
  /// The slopes of the heads end at 2 ^ -alibi_bias_max.
  TORCH_ARG(int64_t, alibi_bias_max) = 8;
};

/// SMP's layer of that name: attention of projected queries, keys and values. Where nothing is
/// dropped (in evaluation, or without attention_dropout_prob) it is libtorch's
/// `scaled_dot_product_attention`, which takes a fused kernel (flash attention) where it has one
/// for the device, the types and the mask. It has no parameters.
///
/// With tensor parallelism the heads of the input are this rank's part of all heads, and masks of
/// dropout those of one process. Throws
/// `UsageError` for sizes that do not fit, and for `scale_attn_by_layer_idx` without `layer_idx`.
class SMP_API FlashAttentionLayerImpl : public torch::nn::Cloneable<FlashAttentionLayerImpl> {
 public:
  explicit FlashAttentionLayerImpl(const FlashAttentionLayerOptions& options = {});

  void reset() override {}
  void pretty_print(std::ostream& stream) const override;

  /// `qkv` [N, S, 3, heads, channels]; `mask`, [N, 1, 1, S] or of sizes that broadcast to [N,
  /// heads, S, S], is added to the scores and may be undefined; with `causal`, a token sees none
  /// after it. Returns [N, heads, S, channels].
  at::Tensor forward(const at::Tensor& qkv, const at::Tensor& mask = {}, bool causal = false);

  FlashAttentionLayerOptions options;

 private:
  double scale_of(int64_t channels) const;
};
TORCH_MODULE(FlashAttentionLayer);

}  // namespace smp::nn
