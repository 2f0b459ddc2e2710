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

}  // namespace smp::nn::rewrite
