// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/normalization.h>

#include <optional>
#include <string>

#include "smp/nn/parallel_linear.h"
#include "smp/nn/transformer_options.h"

/// Functions and types that the modules of a transformer share and only their sources include. With
/// `sliced`, hidden states [N, S, H] are this rank's part of the sequence, dimension 1.
namespace smp::nn {

/// Throws `UsageError` unless one of the layer norms is on and `optimize` is known.
void check_block(const char* module, bool pre_layernorm, bool post_layernorm,
                 const std::optional<std::string>& optimize);

/// Whether a call of `module` on sequences of `length` tokens slices the states between divided
/// regions. Where the options leave it to the configuration, only if the ranks divide the length;
/// a warning says so the first time that they do not.
bool slices(const char* module, const std::optional<std::string>& optimize, int64_t length);

/// A block with these options.
template <class Options>
struct Block {
  const Options& options;

  torch::nn::LayerNorm make_norm() const {
    return torch::nn::LayerNorm(
        torch::nn::LayerNormOptions({options.hidden_size()}).eps(options.layernorm_epsilon()));
  }

  /// Hidden states to `outputs` channels in `blocks` blocks.
  ColumnParallelLinear make_entry(int64_t outputs, int64_t blocks) const {
    return ColumnParallelLinear(ColumnParallelLinearOptions(options.hidden_size(), outputs)
                                    .blocks(blocks)
                                    .init_std(init_std()));
  }

  /// `inputs` channels back to hidden states.
  RowParallelLinear make_exit(int64_t inputs) const {
    return RowParallelLinear(
        RowParallelLinearOptions(inputs, options.hidden_size()).init_std(init_std()));
  }

  std::optional<double> init_std() const {
    return options.use_normal_initialization() ? std::optional(options.initializer_range())
                                               : std::nullopt;
  }
};

/// Options of one module from those of another that has it inside: those of every block, then those
/// of attention and of the output layer, on top of `to`.
template <class To, class From>
To block_options(const From& from) {
  return To()
      .hidden_size(from.hidden_size())
      .hidden_dropout_prob(from.hidden_dropout_prob())
      .layernorm_epsilon(from.layernorm_epsilon())
      .initializer_range(from.initializer_range())
      .use_normal_initialization(from.use_normal_initialization())
      .pre_layernorm(from.pre_layernorm())
      .post_layernorm(from.post_layernorm())
      .fp32_residual_addition(from.fp32_residual_addition())
      .optimize(from.optimize());
}

template <class To, class From>
To attention_options(const From& from, To to) {
  return to.num_attention_heads(from.num_attention_heads())
      .attention_head_size(from.attention_head_size())
      .attention_dropout_prob(from.attention_dropout_prob())
      .causal_mask_size(from.causal_mask_size())
      .use_alibi(from.use_alibi())
      .alibi_bias_max(from.alibi_bias_max())
      .attention_in_fp32(from.attention_in_fp32())
      .query_key_layer_scaling(from.query_key_layer_scaling())
      .flash_attention(from.flash_attention());
}

template <class To, class From>
To output_options(const From& from, To to) {
  return to.intermediate_size(from.intermediate_size()).activation(from.activation());
}

/// This rank's part of the sequence, or `x` itself unless `sliced`; and the way back.
at::Tensor to_slice(const at::Tensor& x, bool sliced);
at::Tensor from_slice(const at::Tensor& x, bool sliced);

/// Layer norm, in the type of its weight; of float32 states in float32. The gradient of the
/// parameters is whole, of sliced states, too.
at::Tensor normalised(const torch::nn::LayerNorm& norm, const at::Tensor& x, bool sliced);

/// Dropout of hidden states.
at::Tensor hidden_dropout(const at::Tensor& x, double p, bool train, bool sliced);

/// Attention with linear biases, [1, heads of this rank, S, keys]: minus the distance, times the
/// slope of the head. `query` is [N, heads of this rank, S, channels], and there are `heads` in
/// all.
at::Tensor score_biases(const at::Tensor& query, int64_t keys, int64_t heads, int64_t bias_max);

/// How products of queries and keys become probabilities.
struct Scores {
  double scale;         ///< factor of the products
  double dropout = 0;   ///< dropout of probabilities
  int64_t divisor = 1;  ///< products are divided by it, and multiplied again in float32
};

/// Attention of this rank's heads, [N, heads, S, channels], one operator after the other, whose
/// probabilities are dropped as in one process. `bias`, which is added to the scaled scores, may be
/// undefined.
at::Tensor attention_in_steps(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const at::Tensor& bias,
                              const Scores& scores);

/// A tensor of half precision in float32, others as they are.
at::Tensor widened(const at::Tensor& x);

/// The residual `x` plus a block's result from it; half precision is added in float32 if `fp32`.
at::Tensor residual(const at::Tensor& x, const at::Tensor& y, bool fp32);

}  // namespace smp::nn
