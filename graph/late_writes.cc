// SPDX-License-Identifier: Apache-2.0
#include "graph/late_writes.h"

#include <algorithm>

#include "graph/requires_grad.h"
#include "graph/visit.h"

namespace smp::graph {

LateWrites::LateWrites(const Graph& graph) {
  const bool any = std::any_of(graph.operators.begin(), graph.operators.end(),
                               [](const Operator& op) { return op.mode.after_backward > 0; });
  if (!any) return;
  sets_.resize(graph.alias_sets);
  for (const Operator& op : graph.operators) {
    if (!records_history(graph, op)) continue;
    const auto save = [&](ValueId id) {
      const int alias_set = graph.values[id].alias_set;
      if (alias_set < 0) return;
      std::vector<int>& saved = sets_[alias_set].saved_after;
      if (saved.empty() || saved.back() < op.mode.after_backward) {
        saved.push_back(op.mode.after_backward);
      }
    };
    for_each_argument(op, save);
    for_each_result(op, save);
  }
}

std::vector<int> LateWrites::moved_by(const Operator& op) {
  std::vector<int> moved;
  if (sets_.empty()) return moved;
  const int now = op.mode.after_backward;
  for (int alias_set : op.writes) {
    Set& set = sets_[alias_set];
    const bool needed = std::any_of(set.saved_after.begin(), set.saved_after.end(), [&](int saved) {
      return saved >= set.moved_after && saved < now;
    });
    if (!needed) continue;
    set.moved_after = now;
    moved.push_back(alias_set);
  }
  return moved;
}

std::vector<int> sets_to_separate(const Graph& graph) {
  std::vector<int> result(graph.alias_sets, kNeverSeparated);
  LateWrites late(graph);
  for (const Operator& op : graph.operators) {
    for (int alias_set : late.moved_by(op)) {
      result[alias_set] = std::min(result[alias_set], op.mode.after_backward);
    }
  }
  return result;
}

}  // namespace smp::graph
