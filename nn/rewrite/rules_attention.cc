// SPDX-License-Identifier: Apache-2.0
// The rule of attention.

#include <algorithm>
#include <cmath>
#include <limits>

#include "nn/rewrite/builtin_rules.h"
#include "nn/rewrite/emitter.h"

namespace smp::nn::rewrite {
namespace {

using graph::ValueId;
using Result = std::optional<Treatment>;

bool drops(const Call& call) { return call.constant("dropout_p").toDouble() > 0; }

ValueId scaled(Emitter& emitter, ValueId value, double factor) {
  return emitter.call("aten::mul", "Scalar", {value}, {factor});
}

/// Scores, -inf where a mask is true.
ValueId hidden(Emitter& emitter, ValueId scores, ValueId where) {
  return emitter.call("aten::masked_fill", "Scalar", {scores, where},
                      {-std::numeric_limits<double>::infinity()});
}

/// The mask of keys that every query may see: -inf where a key comes later.
ValueId masked_by_order(Emitter& emitter, ValueId scores) {
  const graph::TensorMeta meta = emitter.meta(scores);
  const std::vector<int64_t> sizes(meta.sizes.end() - 2, meta.sizes.end());
  const c10::IValue none;
  const auto all =
      emitter.call("aten::new_ones", "", {scores}, {sizes, at::kBool, none, none, none});
  const auto later = emitter.call("aten::triu", "", {all}, {int64_t{1}});
  return hidden(emitter, scores, later);
}

ValueId masked(Emitter& emitter, const Call& call, ValueId scores) {
  const int position = call.position("attn_mask");
  if (position < 0) return scores;
  const ValueId mask = emitter.argument(position);
  if (call.meta(position).dtype != at::kBool) {
    return emitter.call("aten::add", "Tensor", {scores, mask}, {1});
  }
  return hidden(emitter, scores, emitter.call("aten::logical_not", "", {mask}));
}

/// Scores less the distance of query and key, times the slope of the head.
ValueId biased(Emitter& emitter, const Call& call, ValueId scores) {
  const int64_t bias_max = call.attention_form().alibi_bias_max;
  if (bias_max == 0) return scores;
  const auto like = emitter.call("aten::detach", "", {scores});
  const graph::TensorMeta meta = emitter.meta(scores);
  const auto biases =
      emitter.call_own("smp::tp_linear_biases", {like}, {call.meta(0).sizes[1], bias_max},
                       {1, meta.sizes[1], meta.sizes[2], meta.sizes[3]}, meta.dtype);
  return emitter.call("aten::add", "Tensor", {scores, biases}, {1});
}

/// Queries, keys, values or the mask, in the type in which they are worked on.
ValueId operand(Emitter& emitter, const Call& call, int position) {
  const ValueId value = emitter.argument(position);
  return call.attention_form().in_fp32 ? emitter.widened(value) : value;
}

/// Attention in the operators that libtorch makes it of on a CPU: with dropout, so that the mask of
/// all heads is drawn and each rank keeps that of its own.
std::vector<ValueId> emit_attention(Emitter& emitter, const Call& call,
                                    const Treatment& treatment) {
  const auto divisor = static_cast<double>(call.attention_form().divisor);
  const auto width = static_cast<double>(call.meta(0).sizes.back());
  const c10::IValue scale = call.constant("scale");
  const double factor = std::sqrt(scale.isDouble() ? scale.toDouble() : 1 / std::sqrt(width));
  const auto query = scaled(emitter, operand(emitter, call, 0), factor / divisor);
  const auto key = emitter.call("aten::transpose", "int", {operand(emitter, call, 1)},
                                {int64_t{-2}, int64_t{-1}});
  const auto keys = scaled(emitter, key, factor);
  const ValueId values = operand(emitter, call, 2);
  ValueId weights = emitter.call("aten::matmul", "", {query, keys});
  if (divisor > 1) weights = scaled(emitter, emitter.widened(weights), divisor);
  if (call.is_set("is_causal")) weights = masked_by_order(emitter, weights);
  weights = biased(emitter, call, masked(emitter, call, weights));
  weights = emitter.call("aten::_safe_softmax", "", {weights}, {int64_t{-1}, c10::IValue()});
  weights = emitter.converted(weights, emitter.meta(values).dtype);
  if (drops(call)) {
    const graph::TensorMeta meta = emitter.meta(weights);
    const Layout& layout = treatment.arguments[0];
    weights =
        emitter.call_own("smp::tp_dropout", {weights},
                         {call.constant("dropout_p"), true, int64_t{layout.dim}, layout.blocks},
                         meta.sizes, meta.dtype);
    emitter.follow("dropout_p", 1);
  } else {
    emitter.require("dropout_p");
  }
  emitter.require("scale");
  const ValueId context = emitter.call("aten::matmul", "", {weights, values});
  return {emitter.converted(context, call.result_meta().dtype)};
}

/// Attention without dropout, as it is: a probability that comes later would draw other masks.
std::vector<ValueId> emit_plain_attention(Emitter& emitter, const Call& call, const Treatment&) {
  std::vector<graph::Argument> arguments = call.op().arguments;
  for (graph::Argument& argument : arguments) {
    if (argument.kind != graph::Argument::Kind::kTensor) continue;
    const auto at = std::find(call.tensors().begin(), call.tensors().end(), argument.values[0]);
    if (at == call.tensors().end()) continue;
    argument.values = {operand(emitter, call, static_cast<int>(at - call.tensors().begin()))};
  }
  const auto result =
      emitter.call_with("aten::scaled_dot_product_attention", "", std::move(arguments));
  emitter.follow("scale", call.argument("scale"));
  emitter.require("dropout_p");
  return {emitter.converted(result, call.result_meta().dtype)};
}

/// Divided by samples or heads, never along a sequence or within a head.
Result attention(const Call& call) {
  const int first = call.first_divided();
  if (first < 0 || first > 2) return std::nullopt;
  const Layout layout = call.layout(first);
  const int place = layout.dim - call.dim(first);
  const AttentionForm& form = call.attention_form();
  const bool in_steps = drops(call) || form.in_steps;
  const bool grouped = call.is_set("enable_gqa");
  if (place >= -2 || (grouped && (in_steps || layout.blocks != 1))) return std::nullopt;
  const c10::IValue scale = call.constant("scale");
  if (in_steps && scale.isDouble() && scale.toDouble() < 0) return std::nullopt;
  // [N, heads, S, channels], which says where the heads are.
  const bool has_heads = call.dim(0) == 4 && layout.blocks == 1;
  if (form.alibi_bias_max > 0 && !has_heads) return std::nullopt;
  // Autocast would compute in lower precision whatever it is given.
  const graph::ExecutionMode& mode = call.op().mode;
  if (form.in_fp32 && (mode.autocast_cpu || mode.autocast_accelerator)) return std::nullopt;
  Treatment treatment = call.all_shared();
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    const int dim = place + call.dim(i);
    if (dim < 0 || call.meta(i).sizes[dim] == 1) {
      if (i <= 2) return std::nullopt;
      continue;
    }
    if (!can_divide(call.meta(i).sizes, dim, layout.blocks, call.ranks())) return std::nullopt;
    treatment.arguments[i] = layout.along(dim);
    if (call.layout(i) == treatment.arguments[i] || call.is_free_of_gradient(i)) continue;
    treatment.wishes.push_back({i, treatment.arguments[i]});
  }
  treatment.results[0] = treatment.arguments[0];
  treatment.emit = in_steps ? emit_attention : emit_plain_attention;
  return treatment;
}

}  // namespace

RuleTable attention_rules() { return {{"aten::scaled_dot_product_attention", attention}}; }

}  // namespace smp::nn::rewrite
