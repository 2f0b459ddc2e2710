// SPDX-License-Identifier: Apache-2.0
#include "graph/alias_analysis.h"

#include "graph/visit.h"

namespace smp::graph {

AliasAnalysis::AliasAnalysis(const Graph& graph) : sets_(graph.alias_sets) {
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const Value& value = graph.values[v];
    set_of_.push_back(value.alias_set);
    if (value.alias_set < 0) continue;
    Set& set = sets_[value.alias_set];
    const auto id = static_cast<ValueId>(v);
    set.values.push_back(id);
    if (value.kind != ValueKind::kResult && set.base == kUndefined) set.base = id;
  }
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    for (int written : graph.operators[i].writes) {
      auto& writers = sets_[written].writers;
      const auto index = static_cast<int>(i);
      if (writers.empty() || writers.back() != index) writers.push_back(index);
    }
  }
}

const AliasAnalysis::Set& AliasAnalysis::of(ValueId value) const {
  static const Set kNone;
  return set_of_[value] < 0 ? kNone : sets_[set_of_[value]];
}

bool has_result_on(const Graph& graph, const Operator& op, int alias_set) {
  return any_result(graph, op, [&](const Value& value) { return value.alias_set == alias_set; });
}

bool acts_on_arguments(const Graph& graph, const Operator& op) {
  bool found = false;
  for_each_argument(op, [&](ValueId id) {
    found = found || has_result_on(graph, op, graph.values[id].alias_set);
  });
  return found;
}

}  // namespace smp::graph
