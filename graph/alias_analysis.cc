#include "graph/alias_analysis.h"

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

}  // namespace smp::graph
