// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <string>

namespace smp::nn {

// The options of the modules of a transformer. Sizes are those of the whole. Those that several
// modules have are written once:
//
// hidden_size                the last dimension of hidden states
// hidden_dropout_prob        of dropouts other than the one of attention probabilities
// layernorm_epsilon          added to the variance
// initializer_range          standard deviation of the weights, if use_normal_initialization; of
//                            embeddings, always
// use_normal_initialization  weights of linear layers are drawn from a normal distribution, instead
//                            of as torch::nn::Linear draws them
// pre_layernorm              a layer norm at the input of a block
// post_layernorm             a layer norm at its output, after the residual is added; at least one
//                            of the two must be true
// fp32_residual_addition     residuals of half precision are added, and stay, in float32
// optimize                   "speed": between the divided regions all ranks compute the same.
//                            "memory": there each has a part of the sequence, whose length must be
//                            a multiple of the ranks; saves the memory of these activations. None:
//                            the configuration's ("memory" by default), but as "speed" for
//                            a sequence of another length
#define SMP_NN_BLOCK_OPTIONS                          \
  TORCH_ARG(int64_t, hidden_size) = 1024;             \
  TORCH_ARG(double, hidden_dropout_prob) = 0.1;       \
  TORCH_ARG(double, layernorm_epsilon) = 1e-5;        \
  TORCH_ARG(double, initializer_range) = 0.02;        \
  TORCH_ARG(bool, use_normal_initialization) = false; \
  TORCH_ARG(bool, pre_layernorm) = false;             \
  TORCH_ARG(bool, post_layernorm) = true;             \
  TORCH_ARG(bool, fp32_residual_addition) = false;    \
  TORCH_ARG(std::optional<std::string>, optimize) = std::nullopt

// num_attention_heads     of all ranks; a multiple of the ranks
// attention_head_size     channels of one head
// attention_dropout_prob  of attention probabilities
// causal_mask_size        the longest sequence, whose tokens see none after them; none: no mask
// use_alibi               attention with linear biases (arXiv 2108.12409)
// alibi_bias_max          the slopes of the heads end at 2 ^ -alibi_bias_max
// attention_in_fp32       from queries, keys and values on, half precision is computed in float32,
//                         under autocast, too
// query_key_layer_scaling
//                         products of queries and keys are divided by the number of the layer, from
//                         1, and multiplied by it again in float32, where the softmax is computed,
//                         too: the same function, without overflows of float16
// flash_attention         where no probability is dropped (and without query_key_layer_scaling),
//                         libtorch's scaled_dot_product_attention, which takes a fused kernel where
//                         it has one; otherwise products and softmax one after the other
#define SMP_NN_ATTENTION_OPTIONS                                      \
  TORCH_ARG(int64_t, num_attention_heads) = 32;                       \
  TORCH_ARG(int64_t, attention_head_size) = 32;                       \
  TORCH_ARG(double, attention_dropout_prob) = 0.1;                    \
  TORCH_ARG(std::optional<int64_t>, causal_mask_size) = std::nullopt; \
  TORCH_ARG(bool, use_alibi) = false;                                 \
  TORCH_ARG(int64_t, alibi_bias_max) = 8;                             \
  TORCH_ARG(bool, attention_in_fp32) = false;                         \
  TORCH_ARG(bool, query_key_layer_scaling) = false;                   \
  TORCH_ARG(bool, flash_attention) = true

// intermediate_size  outputs of the first linear layer; a multiple of the ranks
// activation         between the two linear layers: "gelu", "gelu_new" (its approximation by tanh,
//                    which GPT-2 has) or "relu"
#define SMP_NN_OUTPUT_OPTIONS                   \
  TORCH_ARG(int64_t, intermediate_size) = 4096; \
  TORCH_ARG(std::string, activation) = "gelu"

/// Options of `DistributedAttentionLayer`.
struct DistributedAttentionLayerOptions {
  SMP_NN_BLOCK_OPTIONS;
  SMP_NN_ATTENTION_OPTIONS;
  /// Keys and values come from other states than queries.
  TORCH_ARG(bool, cross_attention) = false;
  /// The number of the layer from 0, for query_key_layer_scaling.
  TORCH_ARG(std::optional<int64_t>, layer_idx) = std::nullopt;
};

/// Options of `DistributedTransformerOutputLayer`.
struct DistributedTransformerOutputLayerOptions {
  SMP_NN_BLOCK_OPTIONS;
  SMP_NN_OUTPUT_OPTIONS;
};

/// Options of `DistributedTransformerLayer`.
struct DistributedTransformerLayerOptions {
  SMP_NN_BLOCK_OPTIONS;
  SMP_NN_ATTENTION_OPTIONS;
  SMP_NN_OUTPUT_OPTIONS;
  /// A layer with cross attention follows the one with self-attention.
  TORCH_ARG(bool, add_cross_attention) = false;
  /// The number of the layer from 0, for query_key_layer_scaling.
  TORCH_ARG(std::optional<int64_t>, layer_idx) = std::nullopt;
};

/// Options of `DistributedTransformer`.
struct DistributedTransformerOptions {
  SMP_NN_BLOCK_OPTIONS;
  SMP_NN_ATTENTION_OPTIONS;
  SMP_NN_OUTPUT_OPTIONS;
  TORCH_ARG(int64_t, num_layers) = 12;
  /// See `DistributedTransformerLayerOptions`.
  TORCH_ARG(bool, add_cross_attention) = false;
};

/// Options of `DistributedTransformerLMHead`.
struct DistributedTransformerLMHeadOptions {
  SMP_NN_BLOCK_OPTIONS;
  SMP_NN_ATTENTION_OPTIONS;
  SMP_NN_OUTPUT_OPTIONS;
  TORCH_ARG(int64_t, num_layers) = 12;
  /// See `DistributedTransformerLayerOptions`.
  TORCH_ARG(bool, add_cross_attention) = false;
  /// Size of the word embedding and of the head; a multiple of the ranks.
  TORCH_ARG(int64_t, vocab_size) = 30522;
  /// The longest sequence.
  TORCH_ARG(int64_t, num_positions) = 1024;
  /// 0: tokens have no types.
  TORCH_ARG(int64_t, num_token_types) = 0;
  /// Whether the hidden states go through the head; otherwise they are the result.
  TORCH_ARG(bool, add_lm_head) = true;
  /// A layer norm after the last layer; none: if layers have one at their input only, whose output
  /// is not normalised.
  TORCH_ARG(std::optional<bool>, final_layernorm) = std::nullopt;
};

#undef SMP_NN_BLOCK_OPTIONS
#undef SMP_NN_ATTENTION_OPTIONS
#undef SMP_NN_OUTPUT_OPTIONS

}  // namespace smp::nn
