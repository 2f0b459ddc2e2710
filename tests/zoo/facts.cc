// SPDX-License-Identifier: Apache-2.0
#include "tests/zoo/facts.h"

#include <algorithm>
#include <map>
#include <vector>

#include "partitioner/cost.h"
#include "partitioner/partition.h"

namespace smp::zoo {

Facts facts_of(graph::Graph graph, const partitioner::Plan& plan) {
  partitioner::estimate_costs(graph, nullptr);
  Facts facts;
  facts.operators = graph.operators.size();
  std::vector<int> operators(plan.stages(), 0);
  std::map<int, double> time;
  double total = 0;
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const double us = partitioner::operator_time_us(graph, graph.operators[i]);
    const int stage = plan.stage_of_operator[i];
    ++operators[stage];
    time[plan.rank_of_stage[stage]] += us;
    total += us;
  }
  double slowest = 0;
  for (const auto& [rank, us] : time) slowest = std::max(slowest, us);
  facts.balance = slowest * static_cast<double>(time.size()) / total;
  for (int stage = 0; stage < plan.stages(); ++stage) {
    facts.stages += (stage == 0 ? "" : " / ") + std::to_string(operators[stage]);
    facts.ranks += (stage == 0 ? "" : " ") + std::to_string(plan.rank_of_stage[stage]);
  }
  for (const graph::Value& value : graph.values) {
    if (value.kind == graph::ValueKind::kParameter) facts.parameters += value.meta.numel();
  }
  for (const auto& transfer : plan.transfers) {
    if (plan.rank_of_stage[transfer.from] == plan.rank_of_stage[transfer.to]) continue;
    const int64_t bytes = graph.values[transfer.value].meta.nbytes();
    facts.forward_bytes += bytes;
    if (transfer.needs_gradient) facts.backward_bytes += bytes;
  }
  return facts;
}

Facts facts_of(graph::Graph graph, int stages) {
  partitioner::estimate_costs(graph, nullptr);
  return facts_of(
      graph, partitioner::partition(graph, partitioner::PartitionOptions(stages).memory_weight(0)));
}

}  // namespace smp::zoo
