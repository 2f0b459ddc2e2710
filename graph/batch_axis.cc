// SPDX-License-Identifier: Apache-2.0
#include "graph/batch_axis.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>

#include "core/check.h"
#include "graph/differentiate.h"
#include "graph/leaf.h"
#include "graph/visit.h"

namespace smp::graph {
namespace {

std::string describe(const Graph& graph, size_t index) {
  const Operator& op = graph.operators[index];
  return c10::str("operator ", index, " (", op.name(),
                  op.scope.empty() ? "" : ", in module \"" + op.scope + "\"", ")");
}

/// Where two captures of one function part; nothing: they have the same operators on the same
/// values.
std::optional<std::string> first_difference(const Graph& one, const Graph& many) {
  const size_t both = std::min(one.operators.size(), many.operators.size());
  for (size_t i = 0; i < both; ++i) {
    const Operator& a = one.operators[i];
    const Operator& b = many.operators[i];
    if (!(a.handle == b.handle)) {
      return c10::str(describe(one, i), " is ", b.name(), " there");
    }
    if (!same_arguments(a, b) || a.results != b.results || !(a.mode == b.mode)) {
      return c10::str(describe(one, i), " works on other tensors there");
    }
  }
  if (one.operators.size() != many.operators.size()) {
    return c10::str("there are ", many.operators.size(), " operators instead of ",
                    one.operators.size());
  }
  const bool same_ends =
      one.inputs == many.inputs && one.outputs == many.outputs && one.roots == many.roots;
  if (same_ends) return std::nullopt;
  return "it returns or differentiates other tensors";
}

/// True if the values are alike, with their memory where an operator writes some.
bool same_values(const Graph& one, const Graph& many) {
  const bool writes = std::any_of(one.operators.begin(), one.operators.end(),
                                  [](const Operator& op) { return !op.writes.empty(); });
  return std::equal(one.values.begin(), one.values.end(), many.values.begin(), many.values.end(),
                    [&](const Value& a, const Value& b) {
                      return a.kind == b.kind && a.name == b.name && a.producer == b.producer &&
                             a.meta.dtype == b.meta.dtype &&
                             a.meta.requires_grad == b.meta.requires_grad &&
                             (!writes || a.alias_set == b.alias_set);
                    });
}

class Finder {
 public:
  Finder(const Graph& one, const Graph& many, int factor)
      : one_(one), many_(many), factor_(factor), partial_(one.values.size()) {}

  BatchAxes run() {
    result_.refusal = why_not_together(one_);
    if (!result_.refusal) compare();
    if (result_.refusal) return std::move(result_);
    do {
      assign_roles();
    } while (add_mixed_sets());
    check_ends();
    return std::move(result_);
  }

 private:
  void compare() {
    if (const auto difference = first_difference(one_, many_)) {
      result_.refusal = c10::str("on ", factor_,
                                 " times the samples the function takes another "
                                 "way: ",
                                 *difference);
    } else if (!same_values(one_, many_)) {
      result_.refusal = c10::str("on ", factor_,
                                 " times the samples its tensors are of other kinds "
                                 "or share memory in another way");
    }
  }

  void assign_roles() {
    result_.role.clear();
    result_.axis.assign(one_.values.size(), kNoAxis);
    std::fill(partial_.begin(), partial_.end(), false);
    for (ValueId input : one_.inputs) {
      if (input == kUndefined) continue;
      const TensorMeta& meta = one_.values[input].meta;
      const TensorMeta& of_many = many_.values[input].meta;
      result_.axis[input] = axis_between(meta, of_many, factor_);
      SMP_INTERNAL_ASSERT(result_.axis[input] != kNoAxis || meta.sizes == of_many.sizes, "input ",
                          one_.values[input].name, " of ", meta.to_string(), " is not cut from ",
                          of_many.to_string());
    }
    for (size_t i = 0; i < one_.operators.size(); ++i) {
      const BatchedCall call(one_, many_, result_.axis, i, factor_);
      result_.role.push_back(role_of(call));
      for (ValueId value : call.results()) {
        partial_[value] = result_.role[i] == BatchRole::kPart;
        if (result_.role[i] == BatchRole::kWhole) result_.axis[value] = call.result_axis(value);
      }
    }
  }

  BatchRole role_of(const BatchedCall& call) const {
    const Operator& op = call.op();
    const auto& tensors = call.tensors();
    const auto partial = [&](ValueId value) { return partial_[value]; };
    if (std::any_of(tensors.begin(), tensors.end(), partial) || is_on_mixed_set(op)) {
      return BatchRole::kPart;
    }
    if (!one_.makes_literal(op) && treats_samples_apart(call)) return BatchRole::kWhole;
    const bool depends = std::any_of(tensors.begin(), tensors.end(),
                                     [&](ValueId value) { return call.batched(value); });
    return depends || op.random_ordinal >= 0 ? BatchRole::kPart : BatchRole::kShared;
  }

  bool is_on_mixed_set(const Operator& op) const {
    bool found = false;
    const auto look = [&](ValueId value) {
      found = found || mixed_sets_.count(one_.values[value].alias_set) > 0;
    };
    for_each_argument(op, look);
    for_each_result(op, look);
    return found;
  }

  /// Storages that are written, and on which operators of several roles work: all of these become
  /// parts.
  bool add_mixed_sets() {
    std::vector<std::set<BatchRole>> roles(one_.alias_sets);
    for (size_t i = 0; i < one_.operators.size(); ++i) {
      const auto note = [&](ValueId value) {
        const int set = one_.values[value].alias_set;
        if (set >= 0) roles[set].insert(result_.role[i]);
      };
      for_each_argument(one_.operators[i], note);
      for_each_result(one_.operators[i], note);
    }
    const size_t before = mixed_sets_.size();
    for (const Operator& op : one_.operators) {
      for (int set : op.writes) {
        if (set >= 0 && roles[set].size() > 1) mixed_sets_.insert(set);
      }
    }
    return mixed_sets_.size() > before;
  }

  void check_ends() {
    for (const BackwardRoot& root : one_.roots) {
      if (partial_[root.value] || result_.axis[root.value] != kNoAxis) continue;
      result_.refusal = "what it differentiates does not depend on the batch";
    }
    const bool any = std::count(result_.role.begin(), result_.role.end(), BatchRole::kWhole) > 0;
    if (!any) result_.refusal = "no operator is known to treat the samples independently";
  }

  const Graph& one_;
  const Graph& many_;
  const int factor_;
  BatchAxes result_;
  std::vector<bool> partial_;  // whether each value exists for each microbatch on its own
  std::set<int> mixed_sets_;
};

}  // namespace

core::Refusal why_not_together(const Graph& graph) {
  std::vector<const Value*> lasting(graph.alias_sets, nullptr);
  for (const Value& value : graph.values) {
    const bool made_inside = value.kind == ValueKind::kResult || value.kind == ValueKind::kLiteral;
    if (!made_inside && value.alias_set >= 0) lasting[value.alias_set] = &value;
  }
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const Operator& op = graph.operators[i];
    if (is_leaf(op.handle)) {
      return describe(graph, i) + " calls a leaf module, whose code is not seen";
    }
    if (op.handle == grad_operator()) {
      return describe(graph, i) + " differentiates the operators of one microbatch";
    }
    for (int set : op.writes) {
      if (set < 0 || lasting[set] == nullptr) continue;
      return c10::str(describe(graph, i), " writes ", to_string(lasting[set]->kind), " \"",
                      lasting[set]->name, "\", which the next microbatch would see");
    }
  }
  return std::nullopt;
}

BatchAxes find_batch_axes(const Graph& one, const Graph& many, int factor) {
  return Finder(one, many, factor).run();
}

}  // namespace smp::graph
