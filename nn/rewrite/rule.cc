// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/rule.h"

#include <algorithm>
#include <mutex>
#include <set>
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

/// Sums of parts stay such if no other operator needs the sums.
std::optional<Treatment> keep_terms(const Call& call, const Factors& factors) {
  std::set<int> all;
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    if (!call.layout(i).is_partial() || call.users(i).size() != 1) return std::nullopt;
    all.insert(i);
  }
  if (call.in_place() || factors.linear.count(all) == 0) return std::nullopt;
  Treatment treatment = call.all_whole();
  std::fill(treatment.arguments.begin(), treatment.arguments.end(), Layout::partial());
  std::fill(treatment.results.begin(), treatment.results.end(), Layout::partial());
  return treatment;
}

/// How a tensor whose dimensions are these factors lies, divided along one in blocks of so many
/// elements; nothing if that is not possible.
std::optional<Layout> along_factor(int factor, int64_t block, c10::IntArrayRef sizes,
                                   const Factors::Dims& dims) {
  const auto at = std::find(dims.begin(), dims.end(), factor) - dims.begin();
  const bool has = at < static_cast<int64_t>(std::min(dims.size(), sizes.size()));
  if (!has || sizes[at] == 0 || sizes[at] % block != 0) return std::nullopt;
  return Layout::divided(static_cast<int>(at), sizes[at] / block);
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

void ask(const Call& call, int position, const Layout& layout, Treatment& treatment) {
  treatment.arguments[position] = layout;
  const bool cheap = call.layout(position) == layout || call.may_become(position, layout) ||
                     call.is_free_of_gradient(position);
  if (!cheap) treatment.wishes.push_back({position, layout});
}

Treatment refused(const Call& call, const Treatment& treatment) {
  Treatment whole = call.all_whole();
  whole.wishes = treatment.wishes;
  return whole;
}

std::optional<Treatment> ask_along(const Call& call, const Factors& factors, int leading) {
  const Layout& first = call.layout(leading);
  const int factor = factors.arguments[leading][first.dim];
  if (factor == kAlong) return std::nullopt;
  const int64_t block = block_of(call.meta(leading).sizes, first);
  Treatment treatment = call.all_shared();
  for (int i = 0; i < static_cast<int>(call.tensors().size()); ++i) {
    const auto wanted = along_factor(factor, block, call.meta(i).sizes, factors.arguments[i]);
    if (factors.ignored.count(i) > 0) {
      treatment.arguments[i] = call.layout(i);
    } else if (wanted) {
      ask(call, i, *wanted, treatment);
    }
  }
  return treatment;
}

std::optional<Treatment> follow(const Call& call) { return follow_from(call, 0); }

std::optional<Treatment> follow_from(const Call& call, int leading) {
  const std::optional<Factors> factors = factors_of(call);
  return factors ? follow_factors(call, *factors, leading) : std::nullopt;
}

std::optional<Treatment> follow_factors(const Call& call, const Factors& factors, int leading) {
  if (leading < 0 || !call.divided(leading)) return keep_terms(call, factors);
  std::optional<Treatment> treatment = ask_along(call, factors, leading);
  const Layout& first = call.layout(leading);
  const int64_t block = block_of(call.meta(leading).sizes, first);
  for (size_t r = 0; treatment && r < call.results().size(); ++r) {
    const auto made = along_factor(factors.arguments[leading][first.dim], block,
                                   call.result_meta(static_cast<int>(r)).sizes, factors.results[r]);
    if (!made) return std::nullopt;
    treatment->results[r] = *made;
  }
  return treatment;
}

}  // namespace smp::nn::rewrite
