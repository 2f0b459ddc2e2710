// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/factors.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "nn/rewrite/rule.h"

namespace smp::nn::rewrite {
namespace {

using Dims = Factors::Dims;
using Found = std::optional<Factors>;

int from_front(int64_t dim, int count) { return static_cast<int>(dim < 0 ? dim + count : dim); }

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
  const std::string library = "aten::";
  const bool is_known = call.base_name().rfind(library, 0) == 0;
  if (!is_known || !call.constant("rounding_mode").isNone()) return {};
  const std::string name = call.base_name().substr(library.size());
  if (name == "where" && call.tensors().size() == 3) return {{1, 2}};
  const auto& table = call.tensors().size() == 1 ? of_one : of_more;
  const auto found = table.find(name);
  return found == table.end() ? std::set<std::set<int>>() : found->second;
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
Found along_named_dims(const Call& call) { return factors_along(call, dims_named(call, "dims")); }

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

Found triangle_factors(const Call& call) {
  Factors factors = factors_along_last(call, 2);
  factors.linear = {{0}};
  return factors;
}

/// Dropout that drops nothing. A mask is drawn of the whole only.
Found dropout_factors(const Call& call) {
  const bool drops = call.is_set("train") && call.constant("p").toDouble() > 0;
  if (drops && !call.of_microbatches()) return std::nullopt;
  Found factors = elementwise_factors(call);
  factors->linear = {{0}};
  return factors;
}

/// libtorch computes the gradients of two bounds in place, in the shape of two of the three
/// tensors, which has to be that of the samples whichever two they are.
Found clamped_factors(const Call& call) {
  const bool sends = call.tensors().size() == 3 && (call.has_gradient(1) || call.has_gradient(2));
  if (call.of_microbatches() && sends) {
    const int batched = call.divided(0) + call.divided(1) + call.divided(2);
    if (batched < 2) return std::nullopt;
  }
  return elementwise_factors(call);
}

/// Each element is drawn for itself.
Found drawn_factors(const Call& call) {
  return call.of_microbatches() ? elementwise_factors(call) : std::nullopt;
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

/// The same memory as elements of another type, of which the last dimension may have other numbers.
Found retyped_factors(const Call& call) {
  Factors factors = factors_along(call, {});
  factors.grouped = {call.dim(0) - 1};
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

/// A value repeated of one element belongs to any rank.
Found repeated_factors(const Call& call) {
  Factors factors = of_first(call);
  const int count = result_dims(call), added = count - call.dim(0);
  const auto repeats = *call.integers("repeats");
  factors.arguments = {numbered(call.dim(0), added)};
  factors.results = {numbered(count)};
  for (int d = 0; d < call.dim(0); ++d) {
    const bool is_one = call.meta(0).sizes[d] == 1 && !call.divided_along(0, d);
    if (!is_one && repeats[added + d] == 1) continue;
    factors.arguments[0][d] = kAlong;
    if (!is_one) factors.results[0][added + d] = kAlong;
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
  const auto named = call.integers("dim");
  const bool none = named && named->empty();
  const std::set<int> dims = none ? std::set<int>() : dims_named(call, "dim");
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

Found gathered_factors(const Call& call) {
  Found factors = joined_factors(call);
  if (!factors) return std::nullopt;
  for (Dims& dims : factors->arguments) dims[*call.dimension("dim")] = kAlong;
  factors->results[0][*call.dimension("dim")] = kAlong;
  factors->linear.clear();
  return factors;
}

/// Windows of one dimension, which are another.
Found unfolded_factors(const Call& call) {
  Factors factors = factors_along(call, {*call.dimension("dimension")});
  factors.results = factors.arguments;
  factors.results[0].push_back(kAlong);
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
// The operators of a tensor-parallel group on whole microbatches

Found exchanged_factors(const Call& call) {
  std::set<int> dims;
  for (const char* name : {"dim", "split_dim", "join_dim"}) {
    if (const auto dim = call.dimension(name)) dims.insert(*dim);
  }
  return factors_along(call, dims);
}

Found gathered_linear_factors(const Call& call) {
  return factors_along(call, {*call.dimension("dim"), call.dim(0) - 1});
}

std::vector<NamedFactors> all_factors() {
  std::vector<NamedFactors> all = {
      {elementwise_factors, elementwise_operators()},
      {clamped_factors, {"clamp.Tensor", "clip.Tensor"}},
      {along_dim, operators_along_dim()},
      {elementwise_factors,
       {"expand_as", "max.other", "min.other", "smp::tp_copy", "smp::tp_reduce"}},
      {drawn_factors,
       {"alpha_dropout", "bernoulli", "exponential", "normal", "rand_like", "randn_like", "rrelu",
        "uniform", "smp::tp_dropout"}},
      {conversion_factors, {"to", "_to_copy", "type_as"}},
      {along_dim, {"index_select", "norm.ScalarOpt_dim_dtype", "repeat_interleave.self_int"}},
      {along_named_dims, {"flip", "roll"}},
      {running_sum, {"cumsum"}},
      {sum_factors, {"sum", "sum.dim_IntList", "mean", "mean.dim"}},
      {triangle_factors, {"tril", "triu"}},
      {dropout_factors, {"dropout"}},
      // "view." is the overload without a name: not view.dtype.
      {view_factors, {"_unsafe_view", "reshape", "view."}},
      {retyped_factors, {"view.dtype"}},
      {flattened_factors, {"flatten.using_ints"}},
      {unflattened_factors, {"unflatten.int"}},
      {view_as_factors, {"view_as", "reshape_as"}},
      {permuted_factors,
       {"permute", "transpose", "t", "numpy_T", "mT", "movedim", "swapaxes", "swapdims"}},
      {expanded_factors, {"expand"}},
      {repeated_factors, {"repeat"}},
      {unsqueezed_factors, {"unsqueeze"}},
      {squeezed_factors, {"squeeze"}},
      {selected_factors, {"select.int", "unbind.int"}},
      {sliced_factors, {"slice.Tensor", "narrow."}},
      {taken_apart_factors,
       {"chunk", "split.Tensor", "split.sizes", "split_with_sizes", "unsafe_chunk",
        "unsafe_split.Tensor", "glu"}},
      {joined_factors, {"cat", "concat"}},
      {stacked_factors, {"stack"}},
      {gathered_factors, {"gather"}},
      {unfolded_factors, {"unfold"}},
      {filled_factors, {"new_ones"}},
      {exchanged_factors,
       {"smp::tp_all_gather", "smp::tp_all_to_all", "smp::tp_gather", "smp::tp_reduce_scatter",
        "smp::tp_scatter"}},
      {gathered_linear_factors, {"smp::tp_gathered_linear"}}};
  const std::vector<NamedFactors> layers = layer_factors();
  all.insert(all.end(), layers.begin(), layers.end());
  return all;
}

using FactorTable = std::map<std::string, std::optional<Factors> (*)(const Call&)>;

/// Later ones know more of an operator than those before.
FactorTable make_table() {
  FactorTable table;
  for (const auto& [factors, names] : all_factors()) {
    for (const std::string name : names) {
      table[name.rfind("smp::", 0) == 0 ? name : "aten::" + name] = factors;
    }
  }
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

std::optional<Factors> elementwise_factors(const Call& call) {
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

Dims numbered(int count, int first) {
  Dims dims(count);
  std::iota(dims.begin(), dims.end(), first);
  return dims;
}

int result_dims(const Call& call, int index) {
  return static_cast<int>(call.result_meta(index).sizes.size());
}

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

std::optional<Factors> factors_of_samples(const Call& call) {
  Factors factors;
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    factors.arguments.emplace_back(call.dim(i), kAlong);
  }
  for (int r = 0; r < static_cast<int>(call.results().size()); ++r) {
    factors.results.emplace_back(result_dims(call, r), kAlong);
    if (call.dim(0) == 0 || factors.results[r].empty()) return std::nullopt;
    factors.arguments[0][0] = factors.results[r][0] = 0;
  }
  return factors;
}

int64_t block_of(c10::IntArrayRef sizes, const Layout& layout) {
  const bool divisible = layout.dim >= 0 && layout.dim < static_cast<int>(sizes.size()) &&
                         layout.blocks > 0 && sizes[layout.dim] % layout.blocks == 0;
  return divisible ? sizes[layout.dim] / layout.blocks : 0;
}

}  // namespace smp::nn::rewrite
