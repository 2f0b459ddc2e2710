// SPDX-License-Identifier: Apache-2.0
// Rules of operators that work on elements, or along some dimensions.

#include <algorithm>

#include "nn/rewrite/builtin_rules.h"
#include "nn/rewrite/emitter.h"

namespace smp::nn::rewrite {
namespace {

using Result = std::optional<Treatment>;

/// A change of type. Sums of parts are taken in the type that they were made in.
Result conversion(const Call& call) { return call.divided(0) ? follow(call) : std::nullopt; }

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

}  // namespace

int leading(const Call& call) {
  const int first = call.first_divided();
  if (call.in_place() && first == 0) return first;
  for (int i = std::max(first, 0); i < static_cast<int>(call.tensors().size()); ++i) {
    if (call.divided(i) && call.in_stream(i)) return i;
  }
  return first;
}

std::optional<Treatment> elementwise(const Call& call) {
  if (call.results().empty()) return std::nullopt;
  const int first = leading(call);
  Result treatment = follow_factors(call, *elementwise_factors(call), first);
  if (first < 0 || !treatment) return treatment;
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    if (call.divided(i) && !treatment->arguments[i].is_divided()) return std::nullopt;
  }
  treatment->cuts_parameters = call.in_stream(first);
  if (call.in_place() && !call.divided(0)) {
    return call.in_stream(first) ? Result(refused(call, *treatment)) : Result();
  }
  const auto& wishes = treatment->wishes;
  const bool costs = std::any_of(wishes.begin(), wishes.end(), [&](const Treatment::Wish& wish) {
    return call.dim(wish.position) == result_dims(call);
  });
  // A residual stream that is whole stays so: terms added to it are joined.
  const bool is_sum = call.base_name() == "aten::add" || call.base_name() == "aten::sub";
  return costs && is_sum && !call.in_stream(first) ? refused(call, *treatment) : treatment;
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
