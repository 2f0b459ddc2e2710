// SPDX-License-Identifier: Apache-2.0
// Rules of operators that work on elements, or along some dimensions.

#include <algorithm>

#include "nn/rewrite/builtin_rules.h"
#include "nn/rewrite/emitter.h"

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

/// A change of type: the result is divided like the first tensor. A second only lends its type.
Result conversion(const Call& call) {
  if (!call.divided(0)) return std::nullopt;
  Treatment treatment = call.all_whole();
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    treatment.arguments[i] = call.layout(static_cast<int>(i));
  }
  treatment.results[0] = call.layout(0);
  return treatment;
}

/// A mean over a divided dimension: the mean of each part is one of `ranks` terms.
std::vector<graph::ValueId> emit_mean(Emitter& emitter, const Call& call, const Treatment&) {
  std::vector<graph::Argument> arguments = call.op().arguments;
  arguments[0] = Emitter::tensor(emitter.argument(0));
  const std::string& overload = call.op().handle.operator_name().overload_name;
  const auto mean = emitter.call_with("aten::mean", overload.c_str(), std::move(arguments));
  return {emitter.call("aten::div", "Scalar", {mean}, {int64_t{call.ranks()}})};
}

/// `sum` and `mean`: over a divided dimension each rank has a part of the sum.
Result sums(const Call& call) {
  const Layout& layout = call.layout(0);
  if (!layout.is_divided() || dims_named(call, "dim").count(layout.dim) == 0) return follow(call);
  Treatment treatment = call.all_whole();
  treatment.arguments[0] = layout;
  treatment.results[0] = Layout::partial();
  if (call.base_name() == "aten::mean") treatment.emit = emit_mean;
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
  return call.divided(0) ? follow_factors(call, factors_along_last(call, count)) : std::nullopt;
}

std::optional<Treatment> along_dims(const Call& call, const char* argument) {
  if (!call.divided(0)) return std::nullopt;
  return follow_factors(call, factors_along(call, dims_named(call, argument)));
}

RuleTable math_rules() {
  RuleTable rules;
  add_rules(rules, elementwise_operators(), elementwise);
  add_rules(rules, {"max.other", "min.other"}, elementwise);
  add_rules(rules, {"to", "_to_copy", "type_as"}, conversion);
  add_rules(rules, operators_along_dim(), [](const Call& call) { return along_dims(call, "dim"); });
  add_rules(rules, {"sum", "sum.dim_IntList", "mean", "mean.dim"}, sums);
  add_rules(rules, {"layer_norm", "rms_norm", "glu"}, follow);
  add_rules(rules, {"tril", "triu"}, [](const Call& call) { return along_last(call, 2); });
  add_rules(rules, {"group_norm"}, group_norm);
  return rules;
}

}  // namespace smp::nn::rewrite
