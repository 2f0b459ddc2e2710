// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <cstdint>

namespace smp {

/// Options of `smp::tensor_parallelism` and `smp::set_tensor_parallelism`: how modules are divided
/// that know nothing of it. Modules of `smp::nn` have options of their own.
struct TensorParallelismOptions {
  /// Whether tables of embeddings may be divided.
  TORCH_ARG(bool, distribute_embedding) = true;
  /// Compute `scaled_dot_product_attention` of half precision in float32.
  TORCH_ARG(bool, attention_in_fp32) = false;
  /// Divide the products of queries and keys of the module's n-th attention in the step function by
  /// n, and multiply them by n again in float32, where the softmax is computed: the same function,
  /// without overflows of float16.
  TORCH_ARG(bool, query_key_layer_scaling) = false;
  /// Whether attention is left to libtorch's fused kernels, where no probability is dropped; else
  /// it is products and a softmax one after the other.
  TORCH_ARG(bool, flash_attention) = true;
  /// Subtract the distance of two tokens times the slope of the head from their score (attention
  /// with linear biases, arXiv 2108.12409).
  TORCH_ARG(bool, use_alibi) = false;
  /// The slopes of the heads end at 2 ^ -alibi_bias_max, which is 1 or more.
  TORCH_ARG(int64_t, alibi_bias_max) = 8;
  /// Add residuals of half precision in float32, and keep the sums so from one to the next.
  TORCH_ARG(bool, fp32_residual_addition) = false;

 public:
  /// Whether attention is computed otherwise than the module says.
  bool changes_attention() const {
    return attention_in_fp32() || query_key_layer_scaling() || !flash_attention() || use_alibi();
  }
  /// Whether anything is.
  bool changes_operators() const { return changes_attention() || fp32_residual_addition(); }
};

}  // namespace smp
