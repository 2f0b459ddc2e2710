// SPDX-License-Identifier: Apache-2.0
#include "smp/nn/attention_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/check.h"
#include "nn/initialization.h"
#include "nn/tensor_group.h"
#include "smp/nn/operators.h"
#include "smp/nn/transformer_parts.h"

namespace smp::nn {
namespace {

constexpr const char* kName = "DistributedAttentionLayer";

/// [N, S, count x heads x channels] as `count` tensors [N, heads, S, channels].
std::vector<at::Tensor> by_heads(const at::Tensor& x, int64_t count, int64_t channels) {
  return x.view({x.size(0), x.size(1), count, -1, channels}).permute({2, 0, 3, 1, 4}).unbind(0);
}

}  // namespace

DistributedAttentionLayerImpl::DistributedAttentionLayerImpl(
    const DistributedAttentionLayerOptions& options_)
    : options(options_) {
  DistributedAttentionLayerImpl::reset();
}

void DistributedAttentionLayerImpl::reset() {
  check_block(kName, options.pre_layernorm(), options.post_layernorm(), options.optimize());
  check_divides(kName, "num_attention_heads", options.num_attention_heads(),
                tensor_group()->size());
  SMP_CHECK_WITH(
      UsageError, !options.query_key_layer_scaling() || options.layer_idx().value_or(-1) >= 0,
      kName, ": query_key_layer_scaling needs layer_idx, the number of the layer from 0. Set it");
  const Block<DistributedAttentionLayerOptions> block{options};
  const int64_t channels = options.num_attention_heads() * options.attention_head_size();
  if (options.pre_layernorm()) {
    pre_layernorm = register_module("pre_layernorm", block.make_norm());
  }
  if (options.cross_attention()) {
    query = register_module("query", block.make_entry(channels, 1));
    key_value = register_module("key_value", block.make_entry(2 * channels, 2));
  } else {
    query_key_value = register_module("query_key_value", block.make_entry(3 * channels, 3));
  }
  dense = register_module("dense", block.make_exit(channels));
  if (options.post_layernorm()) layernorm = register_module("layernorm", block.make_norm());
}

void DistributedAttentionLayerImpl::pretty_print(std::ostream& stream) const {
  stream << "smp::nn::" << kName << "(num_attention_heads=" << options.num_attention_heads()
         << ", attention_head_size=" << options.attention_head_size()
         << ", hidden_size=" << options.hidden_size() << ")";
}

at::Tensor DistributedAttentionLayerImpl::forward(
    const std::tuple<at::Tensor, at::Tensor>& inputs) {
  SMP_CHECK_WITH(UsageError, !options.cross_attention(), kName,
                 ": with cross_attention its input is (hidden states, cross states, mask); got "
                 "two tensors");
  const auto& [hidden, mask] = inputs;
  const bool sliced = slices(kName, options.optimize(), hidden.size(1));
  return from_slice(run(to_slice(hidden, sliced), {}, mask, sliced), sliced);
}

at::Tensor DistributedAttentionLayerImpl::forward(
    const std::tuple<at::Tensor, at::Tensor, at::Tensor>& inputs) {
  SMP_CHECK_WITH(UsageError, options.cross_attention(), kName,
                 ": without cross_attention its input is (hidden states, mask); got three tensors");
  const auto& [hidden, cross, mask] = inputs;
  const bool sliced = slices(kName, options.optimize(), hidden.size(1));
  return from_slice(run(to_slice(hidden, sliced), cross, mask, sliced), sliced);
}

at::Tensor DistributedAttentionLayerImpl::run(const at::Tensor& hidden, const at::Tensor& cross,
                                              const at::Tensor& mask, bool sliced) {
  const int64_t channels = options.attention_head_size();
  const at::Tensor x = pre_layernorm ? normalised(pre_layernorm, hidden, sliced)
                                     : hidden.to(dense->weight.scalar_type());
  std::vector<at::Tensor> parts;
  if (options.cross_attention()) {
    parts = by_heads(query->run(x, sliced), 1, channels);
    // Sliced, too, if the ranks divide them, so that no layer keeps the whole for its backward
    // pass.
    const bool slices_cross = sliced && cross.size(1) % tensor_group()->size() == 0;
    const at::Tensor both = key_value->run(to_slice(cross, slices_cross), slices_cross);
    for (const at::Tensor& part : by_heads(both, 2, channels)) parts.push_back(part);
  } else {
    parts = by_heads(query_key_value->run(x, sliced), 3, channels);
  }
  const at::Tensor context = options.attention_in_fp32()
                                 ? attend_in_fp32(parts[0], parts[1], parts[2], mask)
                                 : attend(parts[0], parts[1], parts[2], mask);
  const at::Tensor y = hidden_dropout(dense->run(context.transpose(1, 2).flatten(2), sliced),
                                      options.hidden_dropout_prob(), is_training(), sliced);
  const at::Tensor sum = residual(hidden, y, options.fp32_residual_addition());
  return layernorm ? normalised(layernorm, sum, sliced) : sum;
}

at::Tensor DistributedAttentionLayerImpl::attend_in_fp32(const at::Tensor& query,
                                                         const at::Tensor& key,
                                                         const at::Tensor& value,
                                                         const at::Tensor& mask) {
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(query.device().type()));
  return attend(widened(query), widened(key), widened(value), mask).to(query.scalar_type());
}

/// Arguments and result are [N, heads of this rank, S, channels].
at::Tensor DistributedAttentionLayerImpl::attend(const at::Tensor& query, const at::Tensor& key,
                                                 const at::Tensor& value, const at::Tensor& mask) {
  const bool causal = options.causal_mask_size().has_value() && !options.cross_attention();
  SMP_CHECK_WITH(UsageError, !causal || query.size(2) <= *options.causal_mask_size(), kName,
                 ": a sequence of ", query.size(2), " tokens is longer than causal_mask_size ",
                 options.causal_mask_size().value_or(0),
                 ". Set it to the longest sequence that there is");
  const double p = options.attention_dropout_prob();
  const bool drops = is_training() && p > 0;
  const bool fused = options.flash_attention() && !drops && !options.query_key_layer_scaling();
  if (fused && !mask.defined() && !options.use_alibi()) {
    return at::scaled_dot_product_attention(query, key, value, {}, 0, causal);
  }
  const at::Tensor bias = score_bias(query, key.size(2), mask);
  if (fused) {
    return at::scaled_dot_product_attention(query, key, value,
                                            bias.defined() ? std::optional(bias) : std::nullopt);
  }
  Scores scores{1 / std::sqrt(static_cast<double>(options.attention_head_size()))};
  if (drops) scores.dropout = p;
  if (options.query_key_layer_scaling()) scores.divisor = *options.layer_idx() + 1;
  return attention_in_steps(query, key, value, bias, scores);
}

/// The term added to the scores: the mask, the causal mask and the linear biases; undefined if
/// there are none.
at::Tensor DistributedAttentionLayerImpl::score_bias(const at::Tensor& query, int64_t keys,
                                                     const at::Tensor& mask) const {
  at::Tensor bias = mask;
  if (mask.defined()) {
    const bool trains = mask.requires_grad();  // gradient: summed over the heads of all ranks
    bias = (trains ? copy_to_group(mask) : mask).to(query.scalar_type());
  }
  const auto add = [&](const at::Tensor& term) { bias = bias.defined() ? bias + term : term; };
  if (options.causal_mask_size() && !options.cross_attention()) {
    add(at::full({keys, keys}, -std::numeric_limits<double>::infinity(), query.options()).triu(1));
  }
  if (options.use_alibi()) {
    add(score_biases(query, keys, options.num_attention_heads(), options.alibi_bias_max()));
  }
  return bias;
}

}  // namespace smp::nn
