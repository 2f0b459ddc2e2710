// SPDX-License-Identifier: Apache-2.0
#include "pipeline/edges.h"

#include <map>
#include <utility>

#include "core/check.h"
#include "graph/requires_grad.h"

namespace smp::pipeline {

using graph::ValueKind;

namespace {

/// The first operator of each stage; for one without operators, as many as there are.
std::vector<int> first_operators(const partitioner::Plan& plan) {
  const auto count = static_cast<int>(plan.stage_of_operator.size());
  std::vector<int> first(plan.stages(), count);
  for (int i = count - 1; i >= 0; --i) first[plan.stage_of_operator[i]] = i;
  return first;
}

}  // namespace

std::vector<Edge> edges_of(const graph::Graph& graph, const partitioner::Plan& plan) {
  std::map<std::pair<int, int>, Edge> edges;
  const auto edge = [&](int from, int to) -> Edge& {
    Edge& found = edges[{from, to}];
    found.from = from;
    found.to = to;
    return found;
  };
  const graph::RequiresGrad requires_grad(graph);
  const std::vector<int> first = first_operators(plan);
  for (const auto& transfer : plan.transfers) {
    Edge& found = edge(transfer.from, transfer.to);
    found.values.push_back(transfer.value);
    if (requires_grad.since(transfer.value) < first[transfer.to]) {
      found.requiring.push_back(transfer.value);
      if (graph::is_unlinked(graph, transfer.value)) found.unlinked.push_back(transfer.value);
    }
    if (transfer.needs_gradient) found.gradients.push_back(transfer.value);
  }
  for (const auto& replica : plan.replicas) {
    if (!graph.trains() || !replica.needs_gradient) continue;
    SMP_INTERNAL_ASSERT(replica.gradient_to < replica.stage, "parameter \"",
                        graph.values[replica.value].name, "\" is owned by stage ", replica.owner,
                        " but stage ", replica.stage, " reads it earlier");
    edge(replica.gradient_to, replica.stage).replicas.push_back(replica.value);
  }
  std::vector<Edge> result;
  for (auto& [ends, found] : edges) result.push_back(std::move(found));
  return result;
}

std::vector<bool> backward_of_stage(const graph::Graph& graph, const partitioner::Plan& plan,
                                    const std::vector<Edge>& edges) {
  std::vector<bool> result(plan.stages(), false);
  if (!graph.trains()) return result;
  for (const int stage : plan.stage_of_root) result[stage] = true;
  for (const StageEdge& edge : stage_edges(edges)) {
    if (edge.needs_gradient) result[edge.from] = true;
  }
  for (const graph::Value& value : graph.values) {
    if (value.kind != ValueKind::kParameter || !value.meta.requires_grad) continue;
    result[plan.owner.at(value.name)] = true;
  }
  return result;
}

std::vector<graph::ValueId> Edge::returning() const {
  std::vector<graph::ValueId> all = gradients;
  all.insert(all.end(), replicas.begin(), replicas.end());
  return all;
}

std::vector<StageEdge> stage_edges(const std::vector<Edge>& edges) {
  std::vector<StageEdge> result;
  for (const Edge& edge : edges) {
    result.push_back({edge.from, edge.to, edge.needs_gradient()});
  }
  return result;
}

}  // namespace smp::pipeline
