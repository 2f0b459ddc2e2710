// SPDX-License-Identifier: Apache-2.0
#include "graph/batch_rules.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>

#include "graph/visit.h"

namespace smp::graph {
namespace {

using Names = std::set<std::string>;

int64_t size_from_end(const TensorMeta& meta, int from_end) {
  const int place = static_cast<int>(meta.sizes.size()) + from_end;
  return place < 0 ? 1 : meta.sizes[place];
}

/// The demand of every rule: the results are batched.
bool results_are_batched(const BatchedCall& call) {
  const auto& results = call.results();
  return !results.empty() && std::all_of(results.begin(), results.end(), [&](ValueId result) {
    return call.result_axis(result) != kNoAxis;
  });
}

int from_end(const BatchedCall& call, ValueId result) {
  return call.result_axis(result) - call.dim(result);
}

/// All tensors but those of the argument are the same for every microbatch.
bool others_are_shared(const BatchedCall& call, const std::vector<ValueId>& own) {
  return std::all_of(call.tensors().begin(), call.tensors().end(), [&](ValueId value) {
    return std::find(own.begin(), own.end(), value) != own.end() || !call.batched(value);
  });
}

/// The first argument is batched, and the others are not.
bool only_first_is_batched(const BatchedCall& call) {
  return !call.tensors().empty() && call.batched(call.tensors()[0]) &&
         others_are_shared(call, {call.tensors()[0]});
}

/// Each element of the results follows from one element of each argument, after broadcasting.
bool is_elementwise(const BatchedCall& call) {
  const int place = from_end(call, call.results()[0]);
  return std::all_of(call.results().begin(), call.results().end(),
                     [&](ValueId result) { return from_end(call, result) == place; }) &&
         std::all_of(call.tensors().begin(), call.tensors().end(),
                     [&](ValueId value) { return call.broadcasts(value, place); });
}

/// The first argument's last `count` dimensions are worked on, those before are independent.
bool leads(const BatchedCall& call, int count) {
  if (!only_first_is_batched(call)) return false;
  const ValueId self = call.tensors()[0];
  return call.axis(self) < call.dim(self) - count;
}

/// The first dimension of the first argument are the samples.
bool is_first_axis(const BatchedCall& call) {
  return only_first_is_batched(call) && call.axis(call.tensors()[0]) == 0;
}

/// None of the dimensions that the argument names is the batch.
bool avoids_axis(const BatchedCall& call, ValueId self, const char* argument) {
  const auto dims = call.integers(argument);
  if (!dims || dims->empty()) return false;  // all of them
  return std::all_of(dims->begin(), dims->end(), [&](int64_t dim) {
    return (dim < 0 ? dim + call.dim(self) : dim) != call.axis(self);
  });
}

bool works_along(const BatchedCall& call, const char* argument) {
  return only_first_is_batched(call) && avoids_axis(call, call.tensors()[0], argument);
}

bool works_along_dim(const BatchedCall& call) { return works_along(call, "dim"); }

/// All tensors are batched along one axis, which is not that of the argument `dim`.
bool joins(const BatchedCall& call) {
  const ValueId first = call.tensors().at(0);
  const auto alike = [&](ValueId value) {
    return call.batched(value) && call.axis(value) == call.axis(first) &&
           call.dim(value) == call.dim(first);
  };
  return std::all_of(call.tensors().begin(), call.tensors().end(), alike) &&
         avoids_axis(call, first, "dim");
}

/// Inserts a dimension: wherever it does, the samples stay apart.
bool stacks(const BatchedCall& call) {
  const ValueId first = call.tensors().at(0);
  return std::all_of(call.tensors().begin(), call.tensors().end(), [&](ValueId value) {
    return call.batched(value) && call.axis(value) == call.axis(first);
  });
}

/// The elements keep their order. In it, microbatches are the middle of (axes before, microbatch,
/// axes after), so they stay so where as many elements come before the new axis.
bool reshapes(const BatchedCall& call) {
  const ValueId self = call.tensors()[0];
  const ValueId result = call.results()[0];
  if (!call.batched(self)) return false;
  const auto before = [](const TensorMeta& meta, int axis) {
    return std::accumulate(meta.sizes.begin(), meta.sizes.begin() + axis, int64_t{1},
                           std::multiplies<>());
  };
  return before(call.meta(self), call.axis(self)) ==
         before(call.meta(result), call.result_axis(result));
}

/// Copies along a dimension are made of values that all samples share, or beside the batch.
bool repeats(const BatchedCall& call) {
  const ValueId self = call.tensors()[0];
  const ValueId result = call.results()[0];
  const int place = from_end(call, result);
  return call.broadcasts(self, place) &&
         (!call.batched(self) ||
          size_from_end(call.meta(self), place) == size_from_end(call.meta(result), place));
}

/// Products of matrices, with dimensions for many of them before: the batch is one of these, or
/// rows of the first, or columns of the second; never the dimension that is summed over.
bool multiplies(const BatchedCall& call, ValueId a, ValueId b) {
  const ValueId result = call.results()[0];
  if (call.dim(a) < 2 || call.dim(b) < 1) return false;
  if (call.dim(b) == 1) return !call.batched(b) && call.axis(a) < call.dim(a) - 1;
  const int place = from_end(call, result);
  if (place == -2) return call.batched(a) && call.axis(a) == call.dim(a) - 2 && !call.batched(b);
  if (place == -1) return call.batched(b) && call.axis(b) == call.dim(b) - 1 && !call.batched(a);
  return call.broadcasts(a, place) && call.broadcasts(b, place);
}

bool multiplies(const BatchedCall& call, const char* first, const char* second) {
  const ValueId a = call.tensors(first).at(0);
  const ValueId b = call.tensors(second).at(0);
  const int place = from_end(call, call.results()[0]);
  const auto& tensors = call.tensors();
  return multiplies(call, a, b) && std::all_of(tensors.begin(), tensors.end(), [&](ValueId value) {
           return value == a || value == b || call.broadcasts(value, place);
         });
}

bool attends(const BatchedCall& call) {
  const ValueId query = call.tensors("query").at(0);
  const int place = from_end(call, call.results()[0]);
  const int own = call.is_set("enable_gqa") ? 3 : 2;  // heads are repeated
  if (place >= -own || call.dim(query) != call.dim(call.results()[0])) return false;
  for (const char* argument : {"query", "key", "value"}) {
    const ValueId value = call.tensors(argument).at(0);
    if (!call.batched(value) || call.axis(value) - call.dim(value) != place) return false;
  }
  const auto mask = call.tensors("attn_mask");
  return mask.empty() || call.broadcasts(mask[0], place);
}

/// Ranks of a tensor-parallel group cut and join another dimension than the batch.
bool exchanges(const BatchedCall& call) {
  const auto avoids = [&](const char* dim) { return avoids_axis(call, call.tensors()[0], dim); };
  return only_first_is_batched(call) &&
         (avoids("dim") || (avoids("split_dim") && avoids("join_dim")));
}

/// Gradients of an embedding that counts how often a row is used depend on the other samples.
bool looks_up(const BatchedCall& call) {
  const auto indices = call.tensors("indices");
  return others_are_shared(call, indices) && !call.is_set("scale_grad_by_freq") &&
         call.axis(indices.at(0)) == call.result_axis(call.results()[0]);
}

/// The batch is the second dimension, or the first of the sequence if that says so; states have it
/// second.
bool recurs(const BatchedCall& call) {
  const auto input = call.tensors("input");
  if (call.dim(input.at(0)) != 3) return false;
  std::vector<ValueId> own = call.tensors("hx");
  const bool states = std::all_of(own.begin(), own.end(), [&](ValueId state) {
    return call.dim(state) == 3 && call.axis(state) == 1;
  });
  own.push_back(input[0]);
  return states && others_are_shared(call, own) &&
         call.axis(input[0]) == (call.is_set("batch_first") ? 0 : 1);
}

bool normalizes_layer(const BatchedCall& call) {
  const auto shape = call.integers("normalized_shape");
  return shape && leads(call, static_cast<int>(shape->size()));
}

bool pads(const BatchedCall& call) {
  auto widths = call.integers("pad");
  if (!widths) widths = call.integers("padding");
  return widths && leads(call, static_cast<int>(widths->size() / 2));
}

bool convolves(const BatchedCall& call) {
  return is_first_axis(call) &&
         call.dim(call.tensors()[0]) == call.dim(call.tensors("weight").at(0));
}

/// Its weight belongs to the second dimension, if it has more than one element.
bool is_prelu(const BatchedCall& call) {
  return only_first_is_batched(call) &&
         (call.axis(call.tensors()[0]) != 1 || call.meta(call.tensors()[1]).numel() == 1);
}

const Names& elementwise_names() {
  static const Names names = {
      "abs",           "acos",        "acosh",       "add",         "addcdiv",     "addcmul",
      "alpha_dropout", "asin",        "asinh",       "atan",        "atan2",       "atanh",
      "bernoulli",     "bitwise_and", "bitwise_not", "bitwise_or",  "bitwise_xor", "ceil",
      "celu",          "clamp",       "clamp_max",   "clamp_min",   "clip",        "clone",
      "contiguous",    "copy",        "copysign",    "cos",         "cosh",        "detach",
      "div",           "divide",      "dropout",     "elu",         "empty_like",  "eq",
      "erf",           "erfc",        "erfinv",      "exp",         "exp2",        "expand",
      "expand_as",     "expm1",       "exponential", "fill",        "floor",       "floor_divide",
      "fmod",          "frac",        "full_like",   "ge",          "gelu",        "greater",
      "greater_equal", "gt",          "hardshrink",  "hardsigmoid", "hardswish",   "hardtanh",
      "isfinite",      "isinf",       "isnan",       "le",          "leaky_relu",  "lerp",
      "less",          "less_equal",  "lgamma",      "log",         "log10",       "log1p",
      "log2",          "log_sigmoid", "logaddexp",   "logical_and", "logical_not", "logical_or",
      "logical_xor",   "logit",       "lt",          "masked_fill", "maximum",     "minimum",
      "mish",          "mul",         "multiply",    "nan_to_num",  "ne",          "neg",
      "negative",      "normal",      "not_equal",   "ones_like",   "positive",    "pow",
      "rand_like",     "randn_like",  "reciprocal",  "relu",        "relu6",       "remainder",
      "round",         "rrelu",       "rsqrt",       "rsub",        "selu",        "sgn",
      "sigmoid",       "sign",        "silu",        "sin",         "sinc",        "sinh",
      "softplus",      "softshrink",  "sqrt",        "square",      "sub",         "subtract",
      "tan",           "tanh",        "threshold",   "to",          "_to_copy",    "true_divide",
      "trunc",         "type_as",     "uniform",     "where",       "xlogy",       "zero",
      "zeros_like"};
  return names;
}

const Names& reshaping_names() {
  static const Names names = {"_unsafe_view", "flatten", "reshape", "reshape_as",
                              "unflatten",    "view",    "view_as"};
  return names;
}

/// Results that follow from sizes and numbers alone, every row alike or drawn anew.
bool is_factory(const std::string& base) {
  static const Names names = {"empty",     "full", "new_empty", "new_full", "new_ones",
                              "new_zeros", "ones", "rand",      "randn",    "zeros"};
  return names.count(base) > 0;
}

struct NamedRule {
  bool (*rule)(const BatchedCall&);
  Names names;                ///< without "aten::"; one with its overload stands for that alone
  bool all_overloads = true;  ///< whether one without an overload stands for all
};

const std::vector<NamedRule>& rules() {
  static const std::vector<NamedRule> rules = {
      {is_elementwise, elementwise_names()},
      {is_elementwise, {"max.other", "min.other", "smp::tp_dropout"}},
      // Permutations of dimensions take the batch along.
      {only_first_is_batched,
       {"alias", "movedim", "permute", "squeeze", "swapaxes", "swapdims", "t", "transpose",
        "unsqueeze", "smp::tp_copy", "smp::tp_reduce"}},
      {reshapes, reshaping_names()},
      // Reductions over the dimensions that the argument names, and what takes these apart.
      {works_along_dim,
       {"all.dim", "any.dim", "max.dim", "mean.dim", "min.dim", "norm.ScalarOpt_dim",
        "norm.ScalarOpt_dim_dtype", "prod.dim_int", "std.correction", "std.dim", "sum.dim_IntList",
        "var.correction", "var.dim"}},
      {works_along_dim,
       {"log_softmax.int", "repeat_interleave.self_int", "select.int", "slice.Tensor",
        "softmax.int", "sort.stable", "split.sizes", "split.Tensor", "unbind.int",
        "unsafe_split.Tensor"}},
      {works_along_dim,
       {"amax", "amin", "argmax", "argmin", "chunk", "cumprod", "cumsum", "glu", "index_select",
        "linalg_vector_norm", "logcumsumexp", "logsumexp", "narrow", "sort", "split_with_sizes",
        "topk", "unsafe_chunk"},
       /*all_overloads=*/false},
      // Works on so many of the last dimensions.
      {[](const BatchedCall& c) { return leads(c, 1); },
       {"adaptive_avg_pool1d", "adaptive_max_pool1d", "avg_pool1d", "max_pool1d",
        "max_pool1d_with_indices", "upsample_linear1d", "upsample_nearest1d", "linear"}},
      {[](const BatchedCall& c) { return leads(c, 2); },
       {"adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "max_pool2d",
        "max_pool2d_with_indices", "tril", "triu", "upsample_bicubic2d", "upsample_bilinear2d",
        "upsample_nearest2d"}},
      {[](const BatchedCall& c) { return leads(c, 3); },
       {"adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d", "max_pool3d",
        "max_pool3d_with_indices", "pixel_shuffle", "pixel_unshuffle", "upsample_nearest3d",
        "upsample_trilinear3d"}},
      {[](const BatchedCall& c) { return multiplies(c, "mat1", "mat2"); }, {"addmm"}},
      {[](const BatchedCall& c) { return multiplies(c, "batch1", "batch2"); }, {"baddbmm"}},
      {[](const BatchedCall& c) { return !c.is_set("training") && is_first_axis(c); },
       {"batch_norm"}},
      {[](const BatchedCall& c) { return multiplies(c, "self", "mat2"); }, {"bmm", "mm"}},
      {joins, {"cat", "concat", "gather"}},
      {pads,
       {"constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
        "replication_pad1d", "replication_pad2d", "replication_pad3d"}},
      {convolves,
       {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
        "convolution"}},
      {looks_up, {"embedding", "smp::tp_embedding"}},
      {is_first_axis, {"feature_dropout", "group_norm"}},
      {[](const BatchedCall& c) { return works_along(c, "dims"); }, {"flip", "roll"}},
      {recurs, {"gru.input", "lstm.input", "rnn_relu.input", "rnn_tanh.input"}},
      {[](const BatchedCall& c) { return is_first_axis(c) && c.dim(c.tensors()[0]) == 4; },
       {"im2col"}},
      {normalizes_layer, {"layer_norm", "rms_norm"}},
      {[](const BatchedCall& c) { return multiplies(c, "self", "other"); }, {"matmul"}},
      {is_prelu, {"prelu"}},
      {repeats, {"repeat"}},
      {attends, {"scaled_dot_product_attention"}},
      {stacks, {"stack"}},
      {exchanges,
       {"smp::tp_all_gather", "smp::tp_all_to_all", "smp::tp_gather", "smp::tp_reduce_scatter",
        "smp::tp_scatter"}},
      {[](const BatchedCall& c) { return leads(c, 1) && exchanges(c); },
       {"smp::tp_gathered_linear"}},
      {[](const BatchedCall& c) { return works_along(c, "dimension"); }, {"unfold"}}};
  return rules;
}

/// Operators whose constants are sizes of their result: those of several microbatches are used.
bool has_sizes(const std::string& base) {
  return is_factory(base) || reshaping_names().count(base) > 0 || base == "expand" ||
         base == "repeat";
}

constexpr char kPrefix[] = "aten::";

std::string without_prefix(const std::string& name) {
  return name.rfind(kPrefix, 0) == 0 ? name.substr(sizeof(kPrefix) - 1) : name;
}

bool follows_rule(const BatchedCall& call, const std::string& base, const std::string& full) {
  if (is_factory(base)) return true;
  if (call.tensors().empty()) return false;
  for (const auto& [rule, names, all_overloads] : rules()) {
    const bool is_its = names.count(full) > 0 || (all_overloads && names.count(base) > 0);
    if (is_its) return rule(call);
  }
  return false;
}

}  // namespace

int axis_between(const TensorMeta& one, const TensorMeta& many, int factor) {
  if (one.sizes.size() != many.sizes.size()) return kNoAxis;
  int axis = kNoAxis;
  for (size_t d = 0; d < one.sizes.size(); ++d) {
    if (one.sizes[d] == many.sizes[d]) continue;
    if (axis != kNoAxis || many.sizes[d] != factor * one.sizes[d]) return kNoAxis;
    axis = static_cast<int>(d);
  }
  return axis;
}

BatchedCall::BatchedCall(const Graph& one, const Graph& many, const std::vector<int>& axes,
                         size_t index, int factor)
    : one_(one), many_(many), axes_(axes), index_(index), factor_(factor) {
  base_name_ = op().handle.operator_name().name;
  if (base_name_.back() == '_') base_name_.pop_back();
  for_each_argument(op(), [&](ValueId value) { tensors_.push_back(value); });
  for_each_result(op(), [&](ValueId value) { results_.push_back(value); });
}

const Argument* BatchedCall::find(const char* argument) const {
  const auto& declared = op().handle.schema().arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    if (declared[i].name() == argument) return &op().arguments[i];
  }
  return nullptr;
}

std::vector<ValueId> BatchedCall::tensors(const char* argument) const {
  std::vector<ValueId> result;
  const Argument* found = find(argument);
  if (found == nullptr) return result;
  for (ValueId value : found->values) {
    if (value != kUndefined) result.push_back(value);
  }
  return result;
}

std::optional<std::vector<int64_t>> BatchedCall::integers(const char* argument) const {
  const Argument* found = find(argument);
  if (found == nullptr || found->kind != Argument::Kind::kConstant) return std::nullopt;
  if (found->constant.isInt()) return std::vector<int64_t>{found->constant.toInt()};
  if (found->constant.isIntList()) return found->constant.toIntVector();
  return std::nullopt;
}

bool BatchedCall::is_set(const char* argument) const {
  const Argument* found = find(argument);
  return found != nullptr && found->constant.isBool() && found->constant.toBool();
}

int BatchedCall::result_axis(ValueId result) const {
  return axis_between(one_.values[result].meta, many_.values[result].meta, factor_);
}

bool BatchedCall::broadcasts(ValueId value, int from_end) const {
  if (batched(value)) return axis(value) - dim(value) == from_end;
  return size_from_end(meta(value), from_end) == 1;
}

bool BatchedCall::shares_alike() const {
  return std::all_of(tensors_.begin(), tensors_.end(), [&](ValueId value) {
    return batched(value) || one_.values[value].meta.sizes == many_.values[value].meta.sizes;
  });
}

bool BatchedCall::same_constants() const {
  const Operator& many = many_.operators[index_];
  const std::string base = without_prefix(base_name_);
  for (size_t i = 0; i < op().arguments.size(); ++i) {
    if (op().arguments[i].kind != Argument::Kind::kConstant) continue;
    if (is_patchable(op().handle.schema(), i)) continue;
    const bool same = constant_to_string(op().arguments[i].constant) ==
                      constant_to_string(many.arguments[i].constant);
    if (!same && !has_sizes(base)) return false;
  }
  return true;
}

bool treats_samples_apart(const BatchedCall& call) {
  const auto& overload = call.op().handle.operator_name().overload_name;
  if (overload.find("out") != std::string::npos) return false;
  if (!results_are_batched(call) || !call.same_constants() || !call.shares_alike()) return false;
  const std::string base = without_prefix(call.base_name());
  const auto& tensors = call.tensors();
  const bool depends = std::any_of(tensors.begin(), tensors.end(),
                                   [&](ValueId value) { return call.batched(value); });
  if (!depends && !has_sizes(base)) return false;
  return follows_rule(call, base, overload.empty() ? base : base + "." + overload);
}

}  // namespace smp::graph
