// SPDX-License-Identifier: Apache-2.0
#include "graph/requires_grad.h"

#include <algorithm>

#include "graph/differentiate.h"
#include "graph/operator_traits.h"
#include "graph/visit.h"

namespace smp::graph {

namespace {

bool cuts_history(const Operator& op) {
  return has_trait(op.handle.schema().name(), OperatorTrait::kCutsHistory);
}

/// The earlier value of a result's tensor, if it is that of an argument; or kUndefined.
ValueId argument_that_is(const Operator& op, ValueId value) {
  ValueId found = kUndefined;
  for_each_same_tensor(op, [&](ValueId result, ValueId argument) {
    if (result == value) found = argument;
  });
  return found;
}

}  // namespace

bool result_requires_grad(const Graph& graph, const Operator& op) {
  return any_result(graph, op, [](const Value& value) { return value.meta.requires_grad; });
}

bool records_history(const Graph& graph, const Operator& op) {
  return op.mode.records_history() && result_requires_grad(graph, op);
}

bool ends_history(const Graph& graph, const Operator& op) {
  return !op.mode.records_history() && result_requires_grad(graph, op);
}

bool is_unlinked(const Graph& graph, ValueId value) {
  const Value& made = graph.values[value];
  if (made.producer < 0 || !made.meta.requires_grad) return false;
  const Operator& op = graph.operators[made.producer];
  const bool begins = op.handle == requires_grad_operator();  // a history of its own
  return ends_history(graph, op) && !begins && argument_that_is(op, value) == kUndefined;
}

bool is_view(const Graph& graph, ValueId value) {
  while (value != kUndefined && graph.values[value].producer >= 0) {
    const Operator& op = graph.operators[graph.values[value].producer];
    if (cuts_history(op)) return false;
    const ValueId before = argument_that_is(op, value);
    if (before == kUndefined) return lies_on_argument(graph, op, value);
    value = before;
  }
  return false;
}

std::vector<ValueId> with_earlier_names(const Graph& graph, ValueId value) {
  std::vector<ValueId> names;
  while (value != kUndefined) {
    names.push_back(value);
    const int producer = graph.values[value].producer;
    if (producer < 0) break;
    const Operator& op = graph.operators[producer];
    const bool other_history =
        cuts_history(op) || (records_history(graph, op) && writes_to(graph, op, value));
    value = other_history ? kUndefined : argument_that_is(op, value);
  }
  return names;
}

RequiresGrad::RequiresGrad(const Graph& graph)
    : family_(graph.values.size()), since_(graph.values.size(), kNever) {
  find_families(graph);
  find_since(graph);
}

ValueId RequiresGrad::root(ValueId value) {
  while (family_[value] != value) value = family_[value] = family_[family_[value]];
  return value;
}

/// Union-find, flattened at the end.
void RequiresGrad::find_families(const Graph& graph) {
  for (size_t v = 0; v < family_.size(); ++v) family_[v] = static_cast<ValueId>(v);
  for (const Operator& op : graph.operators) {
    // A tensor that is written or detached in place is still the base of its views; a tensor read
    // meanwhile may share its memory only.
    const auto join = [&](ValueId a, ValueId b) { family_[root(a)] = root(b); };
    for_each_same_tensor(op, join);
    if (cuts_history(op)) continue;
    for (size_t r = 0; r < op.results.size(); ++r) {
      const ValueId result = op.results[r];
      if (result == kUndefined || op.result_is_argument[r] >= 0) continue;
      // The first that it shares memory with: expand_as only looks at the second.
      bool is_joined = false;
      for_each_argument(op, [&](ValueId argument) {
        const int set = graph.values[result].alias_set;
        if (is_joined || set < 0 || set != graph.values[argument].alias_set) return;
        join(result, argument);
        is_joined = true;
      });
    }
  }
  for (size_t v = 0; v < family_.size(); ++v) family_[v] = root(static_cast<ValueId>(v));
}

void RequiresGrad::find_since(const Graph& graph) {
  std::vector<std::vector<ValueId>> members(graph.values.size());
  for (size_t v = 0; v < graph.values.size(); ++v) {
    members[family_[v]].push_back(static_cast<ValueId>(v));
    if (graph.values[v].meta.requires_grad) since_[v] = graph.values[v].producer;
  }
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const Operator& op = graph.operators[i];
    if (op.writes.empty() || !records_history(graph, op)) continue;
    for_each_result(op, [&](ValueId result) {
      if (!writes_to(graph, op, result) || !graph.values[result].meta.requires_grad) return;
      const int index = static_cast<int>(i);
      for (ValueId member : members[family_[result]]) {
        if (graph.values[member].producer < index) since_[member] = std::min(since_[member], index);
      }
    });
  }
}

}  // namespace smp::graph
