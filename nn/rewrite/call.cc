// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/call.h"

#include <c10/core/Contiguity.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "graph/visit.h"

namespace smp::nn::rewrite {

using graph::Argument;
using graph::ValueId;

bool works_on_parts(const Treatment& treatment) {
  const auto is_part = [](const Layout& layout) {
    return layout.is_divided() || layout.is_partial();
  };
  return std::any_of(treatment.arguments.begin(), treatment.arguments.end(), is_part) ||
         std::any_of(treatment.results.begin(), treatment.results.end(), is_part);
}

Call::Call(const graph::Graph& graph, size_t index, int ranks, const Layouts& layouts,
           const AttentionForm& form, bool is_residual_sum)
    : graph_(graph),
      index_(index),
      ranks_(ranks),
      layouts_(layouts),
      form_(form),
      is_residual_sum_(is_residual_sum) {
  base_name_ = op().handle.operator_name().name;
  in_place_ = base_name_.back() == '_' && !op().writes.empty();
  if (in_place_) base_name_.pop_back();
  for (const Argument& argument : op().arguments) {
    const size_t before = tensors_.size();
    for (ValueId value : argument.values) {
      if (value != graph::kUndefined) tensors_.push_back(value);
    }
    first_position_.push_back(tensors_.size() > before ? static_cast<int>(before) : -1);
  }
  graph::for_each_result(op(), [&](ValueId value) { results_.push_back(value); });
}

int Call::argument(const char* name) const {
  const auto& declared = op().handle.schema().arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    if (declared[i].name() == name) return static_cast<int>(i);
  }
  return -1;
}

int Call::position(const char* name) const {
  const int index = argument(name);
  return index < 0 ? -1 : first_position_[index];
}

c10::IValue Call::constant(const char* name) const {
  const int index = argument(name);
  return index < 0 ? c10::IValue() : op().arguments[index].constant;
}

std::optional<std::vector<int64_t>> Call::integers(const char* name) const {
  const c10::IValue value = constant(name);
  if (value.isInt()) return std::vector<int64_t>{value.toInt()};
  if (value.isIntList()) return value.toIntVector();
  return std::nullopt;
}

bool Call::is_set(const char* name) const {
  const c10::IValue value = constant(name);
  return value.isBool() && value.toBool();
}

std::optional<int> Call::dimension(const char* name) const {
  const auto value = integers(name);
  if (!value || value->size() != 1) return std::nullopt;
  const int own = static_cast<int>((*value)[0]);
  return own < 0 ? own + dim(0) : own;
}

bool is_contiguous(const graph::TensorMeta& meta) {
  return c10::_compute_contiguous<int64_t>(meta.sizes, meta.strides, meta.numel());
}

bool Call::may_become(int position, const Layout& layout) const {
  return layouts_.free[tensors_[position]] != 0 &&
         can_divide(meta(position).sizes, layout.dim, layout.blocks, ranks_);
}

bool Call::is_free_of_gradient(int position) const {
  return layout(position).is_whole() && !has_gradient(position);
}

std::optional<Layout> Call::constraint(int index) const {
  const ValueId result = results_[index];
  const auto found = layouts_.constraints->find(result);
  const bool holds = found != layouts_.constraints->end() &&
                     layouts_.whole_sets.count(graph_.values[result].alias_set) == 0;
  return holds ? std::optional(found->second) : std::nullopt;
}

int Call::first_divided() const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (divided(static_cast<int>(i))) return static_cast<int>(i);
  }
  return -1;
}

Treatment Call::all_whole() const {
  Treatment treatment;
  treatment.arguments.resize(tensors_.size());
  treatment.results.resize(results_.size());
  return treatment;
}

Treatment Call::all_shared() const {
  Treatment treatment = all_whole();
  for (Layout& layout : treatment.arguments) layout = Layout::shared();
  return treatment;
}

bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

bool is_product(const std::string& base_name) {
  static const std::set<std::string> names = {"aten::addmm",
                                              "aten::baddbmm",
                                              "aten::bmm",
                                              "aten::linear",
                                              "aten::matmul",
                                              "aten::mm",
                                              "aten::scaled_dot_product_attention"};
  return names.count(base_name) > 0 || base_name.rfind("aten::conv", 0) == 0;
}

bool is_rearrangement(const std::string& base_name) {
  static const std::set<std::string> names = {
      "aten::chunk",  "aten::clone",     "aten::contiguous", "aten::mT",
      "aten::narrow", "aten::numpy_T",   "aten::permute",    "aten::reshape",
      "aten::select", "aten::slice",     "aten::split",      "aten::t",
      "aten::to",     "aten::transpose", "aten::unsqueeze",  "aten::view"};
  return names.count(base_name) > 0;
}

const std::vector<const char*>& elementwise_operators() {
  static const std::vector<const char*> names = {
      "abs",          "acos",          "acosh",       "add",         "addcdiv",     "addcmul",
      "alias",        "asin",          "asinh",       "atan",        "atan2",       "atanh",
      "bitwise_and",  "bitwise_not",   "bitwise_or",  "bitwise_xor", "ceil",        "celu",
      "clamp",        "clamp_max",     "clamp_min",   "clip",        "clone",       "contiguous",
      "copy",         "copysign",      "cos",         "cosh",        "detach",      "div",
      "divide",       "elu",           "empty_like",  "eq",          "erf",         "erfc",
      "erfinv",       "exp",           "exp2",        "expm1",       "fill",        "floor",
      "floor_divide", "fmod",          "frac",        "full_like",   "ge",          "gelu",
      "greater",      "greater_equal", "gt",          "hardshrink",  "hardsigmoid", "hardswish",
      "hardtanh",     "isfinite",      "isinf",       "isnan",       "le",          "leaky_relu",
      "lerp",         "less",          "less_equal",  "lgamma",      "log",         "log10",
      "log1p",        "log2",          "log_sigmoid", "logaddexp",   "logical_and", "logical_not",
      "logical_or",   "logical_xor",   "logit",       "lt",          "masked_fill", "maximum",
      "minimum",      "mish",          "mul",         "multiply",    "nan_to_num",  "ne",
      "neg",          "negative",      "not_equal",   "ones_like",   "positive",    "pow",
      "reciprocal",   "relu",          "relu6",       "remainder",   "round",       "rsqrt",
      "rsub",         "selu",          "sgn",         "sigmoid",     "sign",        "silu",
      "sin",          "sinc",          "sinh",        "softplus",    "softshrink",  "sqrt",
      "square",       "sub",           "subtract",    "tan",         "tanh",        "threshold",
      "true_divide",  "trunc",         "where",       "xlogy",       "zero",        "zeros_like"};
  return names;
}

const std::vector<const char*>& operators_along_dim() {
  static const std::vector<const char*> names = {"all.dim",
                                                 "amax",
                                                 "amin",
                                                 "any.dim",
                                                 "argmax",
                                                 "argmin",
                                                 "cummax",
                                                 "cummin",
                                                 "cumprod",
                                                 "cumsum",
                                                 "linalg_vector_norm",
                                                 "log_softmax.int",
                                                 "logcumsumexp",
                                                 "logsumexp",
                                                 "max.dim",
                                                 "min.dim",
                                                 "norm.ScalarOpt_dim",
                                                 "prod.dim_int",
                                                 "softmax.int",
                                                 "_safe_softmax",
                                                 "sort",
                                                 "sort.stable",
                                                 "std.correction",
                                                 "std.dim",
                                                 "topk",
                                                 "var.correction",
                                                 "var.dim"};
  return names;
}

std::vector<int> order_of(const Call& call) {
  const int count = call.dim(0);
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  const auto wrap = [&](int64_t dim) { return static_cast<int>(dim < 0 ? dim + count : dim); };
  const std::string& name = call.base_name();
  if (name == "aten::permute") {
    const auto dims = call.integers("dims");
    for (int d = 0; d < count; ++d) order[d] = wrap((*dims)[d]);
  } else if (name == "aten::movedim") {
    const auto source = call.integers("source"), destination = call.integers("destination");
    std::map<int, int> moved;  // from places in the result
    for (size_t i = 0; i < source->size(); ++i) {
      moved[wrap((*destination)[i])] = wrap((*source)[i]);
      order.erase(std::find(order.begin(), order.end(), wrap((*source)[i])));
    }
    for (const auto& [place, dim] : moved) order.insert(order.begin() + place, dim);
  } else if (name == "aten::t" || name == "aten::numpy_T" || name == "aten::mT") {
    if (count < 2) return order;
    if (name == "aten::numpy_T") {
      std::reverse(order.begin(), order.end());
    } else {
      std::swap(order[count - 2], order[count - 1]);
    }
  } else {
    const bool axes = call.argument("axis0") >= 0;
    const auto first = call.integers(axes ? "axis0" : "dim0");
    const auto second = call.integers(axes ? "axis1" : "dim1");
    if (!first || !second) return {};
    if (count > 0) std::swap(order[wrap((*first)[0])], order[wrap((*second)[0])]);
  }
  return order;
}

bool comes_from_parameter(const graph::Graph& graph, ValueId value) {
  while (true) {
    const graph::Value& made = graph.values[value];
    if (made.kind == graph::ValueKind::kParameter) return true;
    if (made.producer < 0) return false;
    const graph::Operator& op = graph.operators[made.producer];
    if (!is_rearrangement(op.handle.operator_name().name)) return false;
    value = op.arguments[0].values[0];
  }
}

}  // namespace smp::nn::rewrite
