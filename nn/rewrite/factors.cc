// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/factors.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "nn/rewrite/rule.h"

namespace smp::nn::rewrite {
namespace {

using Dims = Factors::Dims;
using Found = std::optional<Factors>;
constexpr int kAlong = Factors::kAlong;

Dims numbered(int count, int first = 0) {
  Dims dims(count);
  std::iota(dims.begin(), dims.end(), first);
  return dims;
}

int result_dims(const Call& call, int index = 0) {
  return static_cast<int>(call.result_meta(index).sizes.size());
}

int from_front(int64_t dim, int count) { return static_cast<int>(dim < 0 ? dim + count : dim); }

/// The factors of an argument that is broadcast to `sizes`, of which dimension d is factor d. One
/// element that all of a dimension share belongs to no rank.
Dims broadcast_dims(const Call& call, int position, c10::IntArrayRef sizes) {
  Dims dims;
  const auto count = static_cast<int>(sizes.size());
  for (int d = 0; d < call.dim(position); ++d) {
    const int factor = d + count - call.dim(position);
    const int64_t own = call.meta(position).sizes[d];
    const bool is_one = own == 1 && !call.divided_along(position, d);
    const bool fits = factor >= 0 && own == sizes[factor] && !is_one;
    dims.push_back(fits ? factor : kAlong);
  }
  return dims;
}

/// Sets of arguments in which an elementwise operator is linear.
std::set<std::set<int>> linear_in(const Call& call) {
  static const std::map<std::string, std::set<std::set<int>>> of_one = {
      {"alias", {{0}}},    {"clone", {{0}}}, {"contiguous", {{0}}}, {"detach", {{0}}},
      {"divide", {{0}}},   {"div", {{0}}},   {"multiply", {{0}}},   {"mul", {{0}}},
      {"negative", {{0}}}, {"neg", {{0}}},   {"positive", {{0}}},   {"true_divide", {{0}}}};
  static const std::map<std::string, std::set<std::set<int>>> of_more = {
      {"add", {{0, 1}}},        {"addcdiv", {{0, 1}}},  {"addcmul", {{0, 1}, {0, 2}}},
      {"copy", {{0, 1}}},       {"div", {{0}}},         {"divide", {{0}}},
      {"lerp", {{0, 1}}},       {"mul", {{0}, {1}}},    {"rsub", {{0, 1}}},
      {"multiply", {{0}, {1}}}, {"subtract", {{0, 1}}}, {"sub", {{0, 1}}},
      {"true_divide", {{0}}}};
  const std::string name = call.base_name().substr(std::string("aten::").size());
  if (!call.constant("rounding_mode").isNone()) return {};
  if (name == "where" && call.tensors().size() == 3) return {{1, 2}};
  const auto& table = call.tensors().size() == 1 ? of_one : of_more;
  const auto found = table.find(name);
  return found == table.end() ? std::set<std::set<int>>() : found->second;
}

Found elementwise_factors(const Call& call) {
  Factors factors;
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    factors.arguments.push_back(broadcast_dims(call, i, call.result_meta().sizes));
  }
  for (size_t r = 0; r < call.results().size(); ++r) {
    factors.results.push_back(numbered(result_dims(call)));
  }
  factors.linear = linear_in(call);
  return factors;
}

/// A change of type. A second tensor only lends its own.
Found conversion_factors(const Call& call) {
  Found factors = elementwise_factors(call);
  if (call.tensors().size() > 1) factors->ignored = {1};
  const bool rounds =
      c10::isFloatingType(call.meta(0).dtype) && c10::isFloatingType(call.result_meta().dtype);
  if (rounds) factors->linear = {{0}};
  return factors;
}

Found along_dim(const Call& call) { return factors_along(call, dims_named(call, "dim")); }

Found running_sum(const Call& call) {
  Factors factors = factors_along(call, dims_named(call, "dim"));
  factors.linear = {{0}};
  return factors;
}

/// Sums and means. Ranks that take means of parts make terms whose sum is `ranks` times the mean:
/// `check_layouts` sees to it that they are divided by that.
Found sum_factors(const Call& call) {
  const std::set<int> dims = dims_named(call, "dim");
  Factors factors = factors_along(call, dims);
  for (int dim : dims) factors.arguments[0][dim] = dim;
  factors.summed = dims;
  factors.linear = {{0}};
  return factors;
}

Found norm_factors(const Call& call) {
  return factors_along_last(call, static_cast<int>(call.integers("normalized_shape")->size()));
}

Found triangle_factors(const Call& call) {
  Factors factors = factors_along_last(call, 2);
  factors.linear = {{0}};
  return factors;
}

/// Samples, and channels where parts have whole groups.
Found group_norm_factors(const Call& call) {
  Factors factors = factors_along_last(call, call.dim(0) - 1);
  const int64_t in_group = call.meta(0).sizes[1] / call.constant("num_groups").toInt();
  const int64_t parts = call.divided(0) ? call.layout(0).blocks : 1;
  if (in_group == 0 || call.local_size(0, 1) / parts % in_group != 0) return factors;
  factors.arguments[0][1] = factors.results[0][1] = 1;
  for (size_t i = 1; i < factors.arguments.size(); ++i) factors.arguments[i] = {1};
  return factors;
}

/// Dropout that drops nothing. A mask is drawn of the whole only.
Found dropout_factors(const Call& call) {
  const bool drops = call.is_set("train") && call.constant("p").toDouble() > 0;
  if (drops) return std::nullopt;
  Found factors = elementwise_factors(call);
  factors->linear = {{0}};
  return factors;
}

// ---------------------------------------------------------------------------------------------
// Operators that keep elements and give them other places

Factors of_first(const Call& call) {
  Factors factors;
  factors.arguments = {numbered(call.dim(0))};
  factors.linear = {{0}};
  return factors;
}

Found view_factors(const Call& call) {
  Factors factors = of_first(call);
  factors.arguments = {Dims(call.dim(0), 0)};
  factors.results = {Dims(result_dims(call), 0)};
  factors.is_view = true;
  return factors;
}

/// The dimensions of a tensor of `count`, of which `merged`, from `first` on, are one factor.
Dims merged_dims(int count, int first, int merged) {
  Dims dims;
  for (int d = 0; d < count; ++d) {
    dims.push_back(d < first ? d : std::max(first, d - merged + 1));
  }
  return dims;
}

Found flattened_factors(const Call& call) {
  Found factors = view_factors(call);
  const int first = *call.dimension("start_dim"), last = *call.dimension("end_dim");
  factors->arguments = {merged_dims(call.dim(0), first, last - first + 1)};
  factors->results = {numbered(result_dims(call))};
  return factors;
}

Found unflattened_factors(const Call& call) {
  const auto sizes = call.integers("sizes");
  if (!sizes) return std::nullopt;
  Found factors = view_factors(call);
  const int dim = *call.dimension("dim");
  factors->arguments = {numbered(call.dim(0))};
  factors->results = {merged_dims(result_dims(call), dim, static_cast<int>(sizes->size()))};
  return factors;
}

/// Views in the sizes of a second tensor, whose elements do not matter.
Found view_as_factors(const Call& call) {
  Found factors = view_factors(call);
  factors->arguments.emplace_back(call.dim(1), kAlong);
  factors->ignored = {1};
  return factors;
}

Found permuted_factors(const Call& call) {
  const std::vector<int> order = order_of(call);
  if (static_cast<int>(order.size()) != call.dim(0)) return std::nullopt;
  Factors factors = of_first(call);
  factors.results.emplace_back(order.begin(), order.end());
  return factors;
}

/// One element is repeated to dimensions of any size.
Found expanded_factors(const Call& call) {
  Factors factors = of_first(call);
  factors.arguments = {broadcast_dims(call, 0, call.result_meta().sizes)};
  factors.results = {numbered(result_dims(call))};
  return factors;
}

Found repeated_factors(const Call& call) {
  Factors factors = of_first(call);
  factors.results = {numbered(result_dims(call), call.dim(0) - result_dims(call))};
  const auto repeats = *call.integers("repeats");
  for (size_t d = 0; d < repeats.size(); ++d) {
    int& factor = factors.results[0][d];
    if (repeats[d] != 1 || factor < 0) factor = kAlong;
  }
  return factors;
}

Found unsqueezed_factors(const Call& call) {
  Factors factors = of_first(call);
  Dims result = factors.arguments[0];
  result.insert(result.begin() + from_front((*call.integers("dim"))[0], result_dims(call)), kAlong);
  factors.results = {result};
  return factors;
}

/// A dimension of which a rank has a single element must not go.
Found squeezed_factors(const Call& call) {
  Factors factors = of_first(call);
  const bool names = call.argument("dim") >= 0;
  const std::set<int> dims = dims_named(call, names ? "dim" : "");
  Dims result;
  for (int d = 0; d < call.dim(0); ++d) {
    int& factor = factors.arguments[0][d];
    if (dims.count(d) > 0 && call.local_size(0, d) == 1) factor = kAlong;
    const bool goes = dims.count(d) > 0 && call.meta(0).sizes[d] == 1;
    if (!goes) result.push_back(factor);
  }
  factors.results = {result};
  return factors;
}

/// `select` and `unbind` take a dimension away.
Found selected_factors(const Call& call) {
  Factors factors = factors_along(call, {*call.dimension("dim")});
  factors.linear = {{0}};
  return factors;
}

/// Parts of a dimension that is divided are made of whole blocks: those of the results have the
/// size of the argument's, and begin where one begins.
Found sliced_factors(const Call& call) {
  Factors factors = of_first(call);
  const int dim = *call.dimension("dim");
  if (call.divided_along(0, dim)) {
    const int64_t block = block_of(call.meta(0).sizes, call.layout(0));
    const int64_t size = call.meta(0).sizes[dim];
    const auto step = call.integers("step"), start = call.integers("start");
    const int64_t named = start ? (*start)[0] : 0;
    const int64_t first = std::clamp<int64_t>(named < 0 ? named + size : named, 0, size);
    if ((step && (*step)[0] != 1) || block == 0 || first % block != 0) {
      factors.arguments[0][dim] = kAlong;
    }
  }
  factors.results = {factors.arguments[0]};
  return factors;
}

/// `chunk` and `split`, and `glu`, which multiplies halves.
Found taken_apart_factors(const Call& call) {
  Factors factors = of_first(call);
  const int dim = *call.dimension("dim");
  if (call.argument("chunks") >= 0 && call.divided_along(0, dim)) {
    // So many pieces of the whole must be the ranks' pieces, and all of one size.
    const int64_t size = call.local_size(0, dim), chunks = call.constant("chunks").toInt();
    const int64_t length = (size + chunks - 1) / chunks;
    const int64_t of_whole = (size * call.ranks() + chunks - 1) / chunks;
    const bool same = of_whole == length * call.ranks() && size % length == 0;
    if (!same) factors.arguments[0][dim] = kAlong;
  }
  factors.results.assign(call.results().size(), factors.arguments[0]);
  if (call.base_name() == "aten::glu") factors.linear.clear();
  return factors;
}

std::set<int> all_arguments_of(const Call& call) {
  std::set<int> all;
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) all.insert(i);
  return all;
}

Found joined_factors(const Call& call) {
  Factors factors;
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    if (call.dim(i) != result_dims(call)) return std::nullopt;
    factors.arguments.push_back(numbered(call.dim(i)));
  }
  factors.results = {numbered(result_dims(call))};
  factors.linear = {all_arguments_of(call)};
  return factors;
}

/// New tensors, all elements of which are alike.
Found filled_factors(const Call& call) {
  Factors factors;
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    factors.arguments.emplace_back(call.dim(i), kAlong);
    factors.ignored.insert(i);
  }
  factors.results = {numbered(result_dims(call))};
  return factors;
}

Found stacked_factors(const Call& call) {
  Found factors = unsqueezed_factors(call);
  factors->arguments.assign(call.tensors().size(), factors->arguments[0]);
  factors->linear = {all_arguments_of(call)};
  return factors;
}

// ---------------------------------------------------------------------------------------------
// Products

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

/// Samples, channels out, and channels in, over which it sums.
Found convolution_factors(const Call& call) {
  const auto groups = call.integers("groups");
  if (call.dim(0) != call.dim(1) || !groups || (*groups)[0] != 1) return std::nullopt;
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
  if (call.constant("dropout_p").toDouble() > 0 || count < 2) return std::nullopt;
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

using FactorTable = std::map<std::string, std::function<Found(const Call&)>>;

FactorTable make_table() {
  FactorTable table;
  const auto add = [&](std::initializer_list<const char*> names, Found (*factors)(const Call&)) {
    for (const char* name : names) table[std::string("aten::") + name] = factors;
  };
  for (const char* name : elementwise_operators()) {
    table[std::string("aten::") + name] = elementwise_factors;
  }
  for (const char* name : operators_along_dim()) table[std::string("aten::") + name] = along_dim;
  add({"max.other", "min.other"}, elementwise_factors);
  add({"to", "_to_copy", "type_as"}, conversion_factors);
  add({"cumsum"}, running_sum);
  add({"sum", "sum.dim_IntList", "mean", "mean.dim"}, sum_factors);
  add({"layer_norm", "rms_norm"}, norm_factors);
  add({"tril", "triu"}, triangle_factors);
  add({"group_norm"}, group_norm_factors);
  add({"dropout"}, dropout_factors);
  // "view." is the overload without a name: not view.dtype.
  add({"_unsafe_view", "reshape", "view."}, view_factors);
  add({"flatten.using_ints"}, flattened_factors);
  add({"unflatten.int"}, unflattened_factors);
  add({"view_as", "reshape_as"}, view_as_factors);
  add({"permute", "transpose.int", "t", "numpy_T", "mT", "movedim.int", "swapaxes", "swapdims"},
      permuted_factors);
  add({"expand"}, expanded_factors);
  add({"repeat"}, repeated_factors);
  add({"unsqueeze"}, unsqueezed_factors);
  add({"squeeze", "squeeze.dim", "squeeze.dims"}, squeezed_factors);
  add({"select.int", "unbind.int"}, selected_factors);
  add({"slice.Tensor", "narrow."}, sliced_factors);
  add({"chunk", "split.Tensor", "split.sizes", "split_with_sizes", "unsafe_chunk",
       "unsafe_split.Tensor", "glu"},
      taken_apart_factors);
  add({"cat", "concat"}, joined_factors);
  add({"stack"}, stacked_factors);
  add({"new_ones"}, filled_factors);
  add({"linear"}, linear_factors);
  add({"matmul", "mm", "bmm"}, matmul_factors);
  add({"addmm", "baddbmm"}, added_product_factors);
  add({"conv1d", "conv2d", "conv3d"}, convolution_factors);
  add({"embedding"}, embedding_factors);
  add({"scaled_dot_product_attention"}, attention_factors);
  return table;
}

}  // namespace

std::optional<Factors> factors_of(const Call& call) {
  static const FactorTable table = make_table();
  if (call.results().empty()) return std::nullopt;
  for (const std::string& name : names_of(call.op())) {
    const auto found = table.find(name);
    if (found != table.end()) return found->second(call);
  }
  return std::nullopt;
}

std::set<int> dims_named(const Call& call, const char* argument) {
  std::set<int> dims;
  const auto named = call.integers(argument);
  if (named && !named->empty() && call.dim(0) > 0) {
    for (int64_t dim : *named) dims.insert(from_front(dim, call.dim(0)));
  } else {
    for (int d = 0; d < call.dim(0); ++d) dims.insert(d);
  }
  return dims;
}

Factors factors_along(const Call& call, const std::set<int>& dims) {
  Factors factors;
  factors.arguments = {numbered(call.dim(0))};
  for (int dim : dims) factors.arguments[0][dim] = kAlong;
  for (int i = 1; i < static_cast<int>(call.tensors().size()); ++i) {
    factors.arguments.emplace_back(call.dim(i), kAlong);
  }
  Dims result;
  const bool all_stay = !call.results().empty() && result_dims(call) == call.dim(0);
  for (int d = 0; d < call.dim(0); ++d) {
    if (all_stay || dims.count(d) == 0) result.push_back(factors.arguments[0][d]);
  }
  factors.results.assign(call.results().size(), result);
  return factors;
}

Factors factors_along_last(const Call& call, int count) {
  std::set<int> dims, numbers;
  for (int d = std::max(0, call.dim(0) - count); d < call.dim(0); ++d) dims.insert(d);
  for (int i = 1; i < static_cast<int>(call.tensors().size()); ++i) numbers.insert(i);
  Factors factors = factors_along(call, dims);
  if (!numbers.empty()) factors.linear = {numbers};
  return factors;
}

int64_t block_of(c10::IntArrayRef sizes, const Layout& layout) {
  const bool divisible = layout.dim >= 0 && layout.dim < static_cast<int>(sizes.size()) &&
                         layout.blocks > 0 && sizes[layout.dim] % layout.blocks == 0;
  return divisible ? sizes[layout.dim] / layout.blocks : 0;
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

}  // namespace smp::nn::rewrite
