// SPDX-License-Identifier: Apache-2.0
// Rules of operators that work on elements, or along some dimensions.

#include <algorithm>
#include <set>

#include "nn/rewrite/builtin_rules.h"
#include "nn/rewrite/emitter.h"
#include "nn/rewrite/factors.h"

namespace smp::nn::rewrite {
namespace {

using Result = std::optional<Treatment>;

bool is_sum(const Call& call) {
  return call.base_name() == "aten::add" || call.base_name() == "aten::sub";
}

/// Sums of parts go through linear operators, if no other operator needs the sums.
Result linear_on_partial(const Call& call) {
  const std::string& name = call.base_name();
  const auto partial = [&](int i) {
    return call.layout(i).is_partial() && call.users(i).size() == 1;
  };
  const bool pair = is_sum(call) && call.tensors().size() == 2 && partial(0) && partial(1);
  const bool scaled = (name == "aten::mul" || name == "aten::div") && call.tensors().size() == 1 &&
                      call.argument("rounding_mode") < 0;
  const bool same = name == "aten::neg" || name == "aten::clone" || name == "aten::contiguous";
  if (call.in_place() || !(pair || ((scaled || same) && partial(0)))) return std::nullopt;
  Treatment treatment = call.all_whole();
  std::fill(treatment.arguments.begin(), treatment.arguments.end(), Layout::partial());
  treatment.results[0] = Layout::partial();
  return treatment;
}

/// The result is divided like the first tensor. The others only lend their type.
Result like_first(const Call& call) {
  if (!call.divided(0)) return linear_on_partial(call);
  Treatment treatment = call.all_whole();
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    treatment.arguments[i] = call.layout(static_cast<int>(i));
  }
  treatment.results[0] = call.layout(0);
  return treatment;
}

Result to_other(const Call& call) {
  return call.tensors().size() > 1 && !call.divided(0) ? std::nullopt : like_first(call);
}

/// The dimensions that a constant names, counted from the front.
std::set<int> named_dims(const Call& call, const char* argument) {
  std::set<int> dims;
  const auto named = call.integers(argument);
  if (named && !named->empty()) {
    for (int64_t dim : *named) dims.insert(static_cast<int>(dim < 0 ? dim + call.dim(0) : dim));
  } else {
    for (int d = 0; d < call.dim(0); ++d) dims.insert(d);
  }
  return dims;
}

/// Where dimension `dim` of the first tensor is in a result that may lack the dimensions `gone`.
int place_after(const Call& call, int dim, const std::set<int>& gone) {
  if (static_cast<int>(call.result_meta().sizes.size()) == call.dim(0)) return dim;
  return dim - static_cast<int>(
                   std::count_if(gone.begin(), gone.end(), [&](int other) { return other < dim; }));
}

/// A mean over a divided dimension: the mean of each part is one of `ranks` terms.
std::vector<graph::ValueId> emit_mean(Emitter& emitter, const Call& call, const Treatment&) {
  std::vector<graph::Argument> arguments = call.op().arguments;
  arguments[0] = Emitter::tensor(emitter.argument(0));
  const std::string& overload = call.op().handle.operator_name().overload_name;
  const auto mean = emitter.call("aten::mean", overload.c_str(), std::move(arguments));
  return {emitter.call("aten::div", "Scalar",
                       {Emitter::tensor(mean), Emitter::constant(int64_t{call.ranks()})})};
}

/// `sum` and `mean`: over a divided dimension each rank has a part of the sum.
Result sums(const Call& call) {
  Treatment treatment = call.all_whole();
  if (call.layout(0).is_partial() && call.users(0).size() == 1) {
    treatment.arguments[0] = treatment.results[0] = Layout::partial();
    return treatment;
  }
  if (!call.divided(0)) return std::nullopt;
  Layout layout = call.layout(0);
  treatment.arguments[0] = layout;
  const auto dims = named_dims(call, "dim");
  if (dims.count(layout.dim) > 0) {
    treatment.results[0] = Layout::partial();
    if (call.base_name() == "aten::mean") treatment.emit = emit_mean;
  } else {
    layout.dim = place_after(call, layout.dim, dims);
    treatment.results[0] = layout;
  }
  return treatment;
}

/// Groups of channels: divided by samples, or by channels where no group is cut.
Result group_norm(const Call& call) {
  Result treatment = follow(call);
  if (treatment && call.divided_along(0, 1)) {
    const int64_t groups = call.constant("num_groups").toInt();
    treatment->constants.emplace_back(call.argument("num_groups"), groups / call.ranks());
  }
  return treatment;
}

/// The divided argument that the others follow: one that is divided like a stream, if it may; -1:
/// none.
int leading(const Call& call) {
  const int first = call.first_divided();
  if (call.in_place() && first == 0) return first;
  for (int i = std::max(first, 0); i < static_cast<int>(call.tensors().size()); ++i) {
    if (call.divided(i) && call.in_stream(i)) return i;
  }
  return first;
}

}  // namespace

std::optional<Treatment> elementwise(const Call& call) {
  const int first = leading(call);
  if (first < 0) return linear_on_partial(call);
  if (call.results().empty()) return std::nullopt;
  const auto& result = call.result_meta().sizes;
  const int place = call.layout(first).dim - call.dim(first);  // from the end
  const int result_dim = place + static_cast<int>(result.size());
  if (result_dim < 0 || result[result_dim] != call.meta(first).sizes[call.layout(first).dim]) {
    return std::nullopt;
  }
  Treatment treatment = call.all_shared();
  treatment.cuts_parameters = call.in_stream(first);
  Treatment refused = call.all_whole();
  bool costs = false;
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    const int dim = place + call.dim(i);
    if (dim < 0 || call.meta(i).sizes[dim] == 1) {
      if (call.divided(i)) return std::nullopt;
      continue;
    }
    const Layout wanted = call.layout(first).along(dim);
    treatment.arguments[i] = wanted;
    if (call.layout(i) == wanted || call.may_become(i, wanted) || call.is_free_of_gradient(i)) {
      continue;
    }
    treatment.wishes.push_back({i, wanted});
    refused.wishes.push_back({i, wanted});
    costs |= call.dim(i) == static_cast<int>(result.size());
  }
  if (call.in_place() && !call.divided(0))
    return call.in_stream(first) ? Result(refused) : Result();
  // A residual stream that is whole stays so: terms added to it are joined.
  if (costs && is_sum(call) && !call.in_stream(first)) return refused;
  for (Layout& layout : treatment.results) layout = call.layout(first).along(result_dim);
  return treatment;
}

std::optional<Treatment> along_last(const Call& call, int count) {
  if (!call.divided(0) || call.layout(0).dim >= call.dim(0) - count) return std::nullopt;
  Treatment treatment = call.all_shared();
  treatment.arguments[0] = call.layout(0);
  for (Layout& layout : treatment.results) layout = call.layout(0);
  return treatment;
}

std::optional<Treatment> along_dims(const Call& call, const char* argument) {
  if (!call.divided(0)) return std::nullopt;
  Layout layout = call.layout(0);
  const auto dims = named_dims(call, argument);
  if (dims.count(layout.dim) > 0) return std::nullopt;
  Treatment treatment = call.all_shared();
  treatment.arguments[0] = layout;
  layout.dim = place_after(call, layout.dim, dims);
  for (Layout& own : treatment.results) own = layout;
  return treatment;
}

RuleTable math_rules() {
  RuleTable rules;
  for (const char* name : elementwise_operators())
    rules[std::string("aten::") + name] = elementwise;
  rules["aten::max.other"] = elementwise;
  rules["aten::min.other"] = elementwise;
  for (const char* name : {"to", "_to_copy", "type_as"}) {
    rules[std::string("aten::") + name] = to_other;
  }
  for (const char* name : operators_along_dim()) {
    rules[std::string("aten::") + name] = [](const Call& call) { return along_dims(call, "dim"); };
  }
  for (const char* name : {"sum", "sum.dim_IntList", "mean", "mean.dim"}) {
    rules[std::string("aten::") + name] = sums;
  }
  for (const char* name : {"layer_norm", "rms_norm"}) {
    rules[std::string("aten::") + name] = [](const Call& call) {
      return along_last(call, static_cast<int>(call.integers("normalized_shape")->size()));
    };
  }
  for (const char* name : {"tril", "triu"}) {
    rules[std::string("aten::") + name] = [](const Call& call) { return along_last(call, 2); };
  }
  rules["aten::glu"] = follow;
  rules["aten::group_norm"] = group_norm;
  return rules;
}

}  // namespace smp::nn::rewrite
