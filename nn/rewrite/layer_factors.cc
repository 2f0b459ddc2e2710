// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "nn/rewrite/factors.h"

namespace smp::nn::rewrite {
namespace {

using Dims = Factors::Dims;
using Found = std::optional<Factors>;

/// `a` [.., rows, inner] times `b` [.., inner, columns], or, `transposed`, [columns, inner].
/// Factors are the result's dimensions; the one after them is the inner.
Factors product_factors(const Call& call, int a, int b, int bias, bool transposed) {
  const int count = result_dims(call), inner = count;
  const bool has_rows = call.dim(a) >= 2, has_columns = call.dim(b) >= 2;
  // The sizes of all products, seen from an operand whose last dimensions are others.
  const auto dims_of = [&](int position, bool left) {
    Dims dims;
    const int own = call.dim(position);
    const int matrix = std::min(own, 2);
    const int batches = count - (has_rows ? 1 : 0) - (has_columns ? 1 : 0);
    for (int d = 0; d < own - matrix; ++d) {
      const int factor = d + batches - (own - matrix);
      const int64_t size = call.meta(position).sizes[d];
      const bool is_one = size == 1 && !call.divided_along(position, d);
      const bool fits = !is_one && size == call.result_meta().sizes[factor];
      dims.push_back(fits ? factor : kAlong);
    }
    if (own == 1) return Dims{inner};
    const int outer = left ? count - 1 - (has_columns ? 1 : 0) : count - 1;
    const bool inner_last = left || transposed;
    dims.push_back(inner_last ? outer : inner);
    dims.push_back(inner_last ? inner : outer);
    return dims;
  };
  Factors factors;
  factors.arguments.resize(call.tensors().size());
  factors.arguments[a] = dims_of(a, true);
  factors.arguments[b] = dims_of(b, false);
  factors.results = {numbered(count)};
  factors.summed = {inner};
  factors.linear = {{a}, {b}};
  if (bias < 0) return factors;
  factors.arguments[bias] = broadcast_dims(call, bias, call.result_meta().sizes);
  factors.added = {bias};
  factors.linear = {{bias, a}, {bias, b}};
  return factors;
}

Found linear_factors(const Call& call) {
  return product_factors(call, 0, 1, call.position("bias"), true);
}

Found matmul_factors(const Call& call) {
  if (call.dim(0) < 1 || call.dim(1) < 1) return std::nullopt;
  return product_factors(call, 0, 1, -1, false);
}

Found added_product_factors(const Call& call) { return product_factors(call, 1, 2, 0, false); }

/// Samples, and without groups channels out, and channels in, over which it sums.
Found convolution_factors(const Call& call) {
  const auto groups = call.integers("groups");
  if (call.dim(0) != call.dim(1) || !groups) return std::nullopt;
  if ((*groups)[0] != 1) return factors_of_samples(call);
  constexpr int kSamples = 0, kOut = 1, kIn = 2;
  const int bias = call.position("bias");
  Factors factors;
  factors.arguments.assign(2, Dims(call.dim(0), kAlong));
  factors.arguments[0][0] = kSamples;
  factors.arguments[0][1] = kIn;
  factors.arguments[1][0] = kOut;
  factors.arguments[1][1] = kIn;
  factors.results = {Dims(call.dim(0), kAlong)};
  factors.results[0][0] = kSamples;
  factors.results[0][1] = kOut;
  factors.summed = {kIn};
  factors.linear = {{0}, {1}};
  if (bias < 0) return factors;
  factors.arguments.push_back({kOut});
  factors.added = {bias};
  factors.linear = {{0, bias}, {1, bias}};
  return factors;
}

/// Indices and channels. How often an index occurs is not known of parts.
Found embedding_factors(const Call& call) {
  const int count = result_dims(call);
  const bool counts = call.is_set("scale_grad_by_freq") && call.has_gradient(0);
  Factors factors;
  factors.arguments = {{kAlong, count - 1}, numbered(call.dim(1))};
  factors.results = {numbered(count)};
  for (int d = 0; counts && d < call.dim(1); ++d) {
    factors.arguments[1][d] = factors.results[0][d] = kAlong;
  }
  factors.linear = {{0}};
  return factors;
}

/// Samples, heads and channels of values; queries, unless keys are hidden by their order.
Found attention_factors(const Call& call) {
  const int count = result_dims(call);
  const bool drops = call.constant("dropout_p").toDouble() > 0;
  // Queries of its own give each microbatch a mask of its own.
  const bool draws_apart = call.of_microbatches() && call.divided(0);
  if ((drops && !draws_apart) || count < 2) return std::nullopt;
  const bool grouped = call.is_set("enable_gqa");
  const int heads = count - 3, queries = call.is_set("is_causal") ? kAlong : count - 2;
  Factors factors;
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    const int own = call.dim(i);
    Dims dims = broadcast_dims(call, i, call.result_meta().sizes);
    if (own < 2) return std::nullopt;
    if (grouped && i <= 2 && own >= 3) dims[own - 3] = heads;
    const bool is_mask_of_queries =
        i == 3 && (call.meta(i).sizes[own - 2] > 1 || call.divided_along(i, own - 2));
    dims[own - 2] = i == 0 || is_mask_of_queries ? queries : kAlong;
    dims[own - 1] = i == 2 ? count - 1 : kAlong;
    factors.arguments.push_back(std::move(dims));
  }
  factors.results = {numbered(count)};
  factors.results[0][count - 2] = queries;
  factors.linear = {{2}};
  if (grouped) factors.grouped = {heads};
  return factors;
}

// ---------------------------------------------------------------------------------------------
// Other layers

Found norm_factors(const Call& call) {
  return factors_along_last(call, static_cast<int>(call.integers("normalized_shape")->size()));
}

/// Samples, and channels where parts have whole groups.
Found group_norm_factors(const Call& call) {
  if (call.of_microbatches()) return factors_of_samples(call);
  Factors factors = factors_along_last(call, call.dim(0) - 1);
  const int64_t in_group = call.meta(0).sizes[1] / call.constant("num_groups").toInt();
  const int64_t parts = call.divided(0) ? call.layout(0).blocks : 1;
  if (in_group == 0 || call.local_size(0, 1) / parts % in_group != 0) return factors;
  factors.arguments[0][1] = factors.results[0][1] = 1;
  for (size_t i = 1; i < factors.arguments.size(); ++i) factors.arguments[i] = {1};
  return factors;
}

/// Norms with averages of their own.
Found batch_norm_factors(const Call& call) {
  return call.is_set("training") ? std::nullopt : factors_of_samples(call);
}

Found of_sample_convolution(const Call& call) {
  return call.dim(0) == call.dim(1) ? factors_of_samples(call) : std::nullopt;
}

Found of_picture_columns(const Call& call) {
  return call.dim(0) == 4 ? factors_of_samples(call) : std::nullopt;
}

Found feature_dropout_factors(const Call& call) {
  return call.of_microbatches() ? factors_of_samples(call) : std::nullopt;
}

template <int count>
Found along_last_dims(const Call& call) {
  return factors_along_last(call, count);
}

Found padded_factors(const Call& call) {
  auto widths = call.integers("pad");
  if (!widths) widths = call.integers("padding");
  if (!widths) return std::nullopt;
  return factors_along_last(call, static_cast<int>(widths->size() / 2));
}

/// The weight belongs to the second dimension, if it has more than one element.
Found prelu_factors(const Call& call) {
  Factors factors = factors_along(call, {});
  if (call.meta(1).numel() > 1 && call.dim(0) > 1) factors.arguments[1] = {1};
  return factors;
}

/// The batch is the second dimension, or the first of the sequence if that says so; states have it
/// second.
Found recurrent_factors(const Call& call) {
  constexpr int kBatch = 0;
  const bool drops = call.is_set("train") && call.constant("dropout").toDouble() > 0;
  if (call.dim(0) != 3 || (drops && !call.of_microbatches())) return std::nullopt;
  const auto batch_at = [](int dim) {
    Dims dims(3, kAlong);
    dims[dim] = kBatch;
    return dims;
  };
  Factors factors;
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    factors.arguments.emplace_back(call.dim(i), kAlong);
  }
  for (int i = call.position("hx"); i < call.position("params"); ++i) {
    if (call.dim(i) != 3) return std::nullopt;
    factors.arguments[i] = batch_at(1);
  }
  factors.results.assign(call.results().size(), batch_at(1));
  factors.arguments[0] = factors.results[0] = batch_at(call.is_set("batch_first") ? 0 : 1);
  return factors;
}

}  // namespace

std::vector<NamedFactors> layer_factors() {
  return {{linear_factors, {"linear"}},
          {matmul_factors, {"matmul", "mm", "bmm"}},
          {added_product_factors, {"addmm", "baddbmm"}},
          {convolution_factors, {"conv1d", "conv2d", "conv3d"}},
          {of_sample_convolution,
           {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"}},
          {embedding_factors, {"embedding", "smp::tp_embedding"}},
          {attention_factors, {"scaled_dot_product_attention"}},
          {norm_factors, {"layer_norm", "rms_norm"}},
          {group_norm_factors, {"group_norm"}},
          {batch_norm_factors, {"batch_norm"}},
          {feature_dropout_factors, {"feature_dropout"}},
          {of_picture_columns, {"im2col"}},
          {prelu_factors, {"prelu"}},
          {recurrent_factors, {"gru.input", "lstm.input", "rnn_relu.input", "rnn_tanh.input"}},
          {padded_factors,
           {"constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
            "replication_pad1d", "replication_pad2d", "replication_pad3d"}},
          {along_last_dims<1>,
           {"adaptive_avg_pool1d", "adaptive_max_pool1d", "avg_pool1d", "max_pool1d",
            "max_pool1d_with_indices", "upsample_linear1d", "upsample_nearest1d"}},
          {along_last_dims<2>,
           {"adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "max_pool2d",
            "max_pool2d_with_indices", "upsample_bicubic2d", "upsample_bilinear2d",
            "upsample_nearest2d"}},
          {along_last_dims<3>,
           {"adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d", "max_pool3d",
            "max_pool3d_with_indices", "pixel_shuffle", "pixel_unshuffle", "upsample_nearest3d",
            "upsample_trilinear3d"}}};
}

}  // namespace smp::nn::rewrite
