// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/rule.h"

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

/// The name without the underscore of an operator that works in place.
std::string base_of(const graph::Operator& op) {
  std::string name = op.handle.operator_name().name;
  if (name.back() == '_' && !op.writes.empty()) name.pop_back();
  return name;
}

/// "ns::name.overload" comes before "ns::name"; "ns::name." is for no overload only.
Rule find(const RuleTable& rules, const graph::Operator& op) {
  const std::string name = base_of(op);
  for (const std::string& key : {name + "." + op.handle.operator_name().overload_name, name}) {
    const auto found = rules.find(key);
    if (found != rules.end()) return found->second;
  }
  return nullptr;
}

/// True for the overloads that are given the tensor of their result ("out", "int_out", "out_mode";
/// not "dtype_layout").
bool writes_another(const std::string& overload) {
  const std::string end = "_out";
  return overload.rfind("out", 0) == 0 ||
         (overload.size() >= end.size() &&
          overload.compare(overload.size() - end.size(), end.size(), end) == 0);
}

}  // namespace

void register_rule(const std::string& operator_name, Rule rule) {
  const std::lock_guard<std::mutex> lock(registered().mutex);
  registered().rules[operator_name] = std::move(rule);
}

Rule rule_of(const graph::Operator& op) {
  if (writes_another(op.handle.operator_name().overload_name)) return nullptr;
  {
    const std::lock_guard<std::mutex> lock(registered().mutex);
    if (const Rule own = find(registered().rules, op)) return own;
  }
  return find(builtin(), op);
}

}  // namespace smp::nn::rewrite
