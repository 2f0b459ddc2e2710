// SPDX-License-Identifier: Apache-2.0
#include "partitioner/recompute.h"

#include <algorithm>
#include <set>

#include "graph/alias_analysis.h"
#include "partitioner/cost_model.h"
#include "partitioner/data_flow.h"

namespace smp::partitioner {

using graph::Graph;
using graph::Operator;
using graph::Value;
using graph::ValueId;
using graph::ValueKind;

std::vector<bool> repeatable_operators(const Graph& graph) {
  const graph::AliasAnalysis aliases(graph);
  std::vector<bool> repeatable(graph.operators.size(), false);
  const auto everywhere = [&](ValueId id) {
    const Value& value = graph.values[id];
    switch (value.kind) {
      case ValueKind::kInput:
      case ValueKind::kConstant:
      case ValueKind::kLiteral:
        return !aliases.of(id).is_written();
      case ValueKind::kResult:
        return static_cast<bool>(repeatable[value.producer]);
      default:
        return false;
    }
  };
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const Operator& op = graph.operators[i];
    bool ok = op.random_ordinal < 0 && op.writes.empty() && !graph.makes_literal(op);
    for_each_argument(op, [&](ValueId id) { ok = ok && everywhere(id); });
    for_each_result(op, [&](ValueId id) {
      ok = ok && !graph.values[id].meta.requires_grad && !aliases.of(id).is_written();
    });
    repeatable[i] = ok;
  }
  return repeatable;
}

std::vector<int> cheap_recomputation(const Graph& graph, const std::vector<bool>& repeatable,
                                     ValueId value, const std::vector<bool>& have) {
  const double limit = Link().of_tensor(graph.values[value].meta.nbytes());
  double cost = 0;
  std::set<int> needed;
  std::vector<int> open = {graph.values[value].producer};
  while (!open.empty()) {
    const int index = open.back();
    open.pop_back();
    if (index < 0 || have[index] || needed.count(index) > 0) continue;
    if (!repeatable[index]) return {};
    cost += graph.operators[index].cost.forward_us;
    if (cost > limit) return {};
    needed.insert(index);
    for_each_argument(graph.operators[index],
                      [&](ValueId id) { open.push_back(graph.values[id].producer); });
  }
  return {needed.begin(), needed.end()};
}

}  // namespace smp::partitioner
