// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/rule.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "nn/rewrite/builtin_rules.h"

namespace smp::nn::rewrite {
namespace {

struct Registered {
  std::mutex mutex;
  RuleTable rules;
};

Registered& registered() {
  static Registered of_process;
  return of_process;
}

const RuleTable& builtin() {
  static const RuleTable rules = [] {
    RuleTable all = special_rules();  // first, since they know more of some operators
    for (RuleTable (*table)() : {product_rules, attention_rules, shape_rules, math_rules}) {
      for (auto& [name, rule] : table()) all.emplace(name, std::move(rule));
    }
    return all;
  }();
  return rules;
}

/// "ns::name.overload" comes before "ns::name"; "ns::name." is for no overload only.
Rule find(const RuleTable& rules, const graph::Operator& op) {
  for (const std::string& name : names_of(op)) {
    const auto found = rules.find(name);
    if (found != rules.end()) return found->second;
  }
  return nullptr;
}

Rule find_registered(const graph::Operator& op) {
  const std::lock_guard<std::mutex> lock(registered().mutex);
  return find(registered().rules, op);
}

/// True for the overloads that are given the tensor of their result ("out", "int_out", "out_mode";
/// not "dtype_layout").
bool writes_another(const std::string& overload) {
  const std::string end = "_out";
  return overload.rfind("out", 0) == 0 ||
         (overload.size() >= end.size() &&
          overload.compare(overload.size() - end.size(), end.size(), end) == 0);
}

/// A sum of parts stays one if no other operator needs the sum.
bool keeps_terms(const Call& call, const Factors& factors) {
  return call.layout(0).is_partial() && call.users(0).size() == 1 && !call.in_place() &&
         factors.linear.count({0}) > 0;
}

}  // namespace

void add_rules(RuleTable& rules, const std::vector<const char*>& names, const Rule& rule) {
  for (const char* name : names) rules[std::string("aten::") + name] = rule;
}

void register_rule(const std::string& operator_name, Rule rule) {
  const std::lock_guard<std::mutex> lock(registered().mutex);
  registered().rules[operator_name] = std::move(rule);
}

Rule rule_of(const graph::Operator& op) {
  const Rule own = find_registered(op);
  return own ? own : find(builtin(), op);
}

bool is_promised(const graph::Operator& op) { return find_registered(op) != nullptr; }

std::vector<std::string> names_of(const graph::Operator& op) {
  std::string name = op.handle.operator_name().name;
  const std::string& overload = op.handle.operator_name().overload_name;
  if (writes_another(overload)) return {};
  if (name.back() == '_' && !op.writes.empty()) name.pop_back();
  return {name + "." + overload, name};
}

std::optional<Treatment> follow(const Call& call) {
  const std::optional<Factors> factors = factors_of(call);
  return factors ? follow_factors(call, *factors) : std::nullopt;
}

std::optional<Treatment> follow_factors(const Call& call, const Factors& factors) {
  const Layout& first = call.layout(0);
  Treatment treatment = call.all_shared();
  treatment.arguments[0] = first;
  if (!first.is_divided()) {
    if (!keeps_terms(call, factors)) return std::nullopt;
    std::fill(treatment.results.begin(), treatment.results.end(), first);
    return treatment;
  }
  const int factor = factors.arguments[0][first.dim];
  const int64_t block = block_of(call.meta(0).sizes, first);
  if (factor == kAlong) return std::nullopt;
  const auto place = [&](c10::IntArrayRef sizes, const Factors::Dims& dims, Layout& layout) {
    const auto at = std::find(dims.begin(), dims.end(), factor) - dims.begin();
    const bool has = at < static_cast<int64_t>(std::min(dims.size(), sizes.size()));
    const bool fits = has && sizes[at] > 0 && sizes[at] % block == 0;
    if (!fits) return false;
    layout = first.along(static_cast<int>(at));
    layout.blocks = sizes[at] / block;
    return true;
  };
  for (int i = 1; i < static_cast<int>(call.tensors().size()); ++i) {
    place(call.meta(i).sizes, factors.arguments[i], treatment.arguments[i]);
  }
  for (size_t r = 0; r < call.results().size(); ++r) {
    const auto& sizes = call.result_meta(static_cast<int>(r)).sizes;
    if (!place(sizes, factors.results[r], treatment.results[r])) return std::nullopt;
  }
  return treatment;
}

}  // namespace smp::nn::rewrite
