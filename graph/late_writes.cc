// SPDX-License-Identifier: Apache-2.0
#include "graph/late_writes.h"

#include <algorithm>

#include "graph/requires_grad.h"
#include "graph/visit.h"

namespace smp::graph {

std::vector<bool> sets_to_separate(const Graph& graph) {
  std::vector<bool> result(graph.alias_sets, false);
  const auto late = [](const Operator& op) { return op.mode.after_backward; };
  if (std::none_of(graph.operators.begin(), graph.operators.end(), late)) return result;
  std::vector<bool> needed(graph.alias_sets, false);
  for (const Operator& op : graph.operators) {
    if (late(op) || !records_history(graph, op)) continue;
    const auto need = [&](ValueId id) {
      const int alias_set = graph.values[id].alias_set;
      if (alias_set >= 0) needed[alias_set] = true;
    };
    for_each_argument(op, need);
    for_each_result(op, need);
  }
  for (const Operator& op : graph.operators) {
    if (!late(op)) continue;
    for (int alias_set : op.writes) result[alias_set] = needed[alias_set];
  }
  return result;
}

}  // namespace smp::graph
