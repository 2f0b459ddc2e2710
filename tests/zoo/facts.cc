#include "tests/zoo/facts.h"

#include <algorithm>
#include <vector>

#include "partitioner/cost.h"
#include "partitioner/partition.h"

namespace smp::zoo {

Facts facts_of(graph::Graph graph, int stages) {
  partitioner::estimate_costs(graph, nullptr);
  const auto plan =
      partitioner::partition(graph, partitioner::PartitionOptions(stages).memory_weight(0));
  Facts facts;
  facts.operators = graph.operators.size();
  std::vector<int> operators(stages, 0);
  std::vector<double> time(stages, 0);
  double total = 0;
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const double us = partitioner::operator_time_us(graph, graph.operators[i]);
    ++operators[plan.stage_of_operator[i]];
    time[plan.stage_of_operator[i]] += us;
    total += us;
  }
  for (int count : operators) {
    facts.stages += (facts.stages.empty() ? "" : " / ") + std::to_string(count);
  }
  facts.balance = *std::max_element(time.begin(), time.end()) * stages / total;
  for (const graph::Value& value : graph.values) {
    if (value.kind == graph::ValueKind::kParameter) facts.parameters += value.meta.numel();
  }
  for (const auto& transfer : plan.transfers) {
    const int64_t bytes = graph.values[transfer.value].meta.nbytes();
    facts.forward_bytes += bytes;
    if (transfer.needs_gradient) facts.backward_bytes += bytes;
  }
  return facts;
}

}  // namespace smp::zoo
