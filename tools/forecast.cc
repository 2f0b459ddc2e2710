// SPDX-License-Identifier: Apache-2.0
#include "tools/forecast.h"

#include <utility>

namespace smp::tools {

Forecast forecast(const Config& config, const std::string& file, const graph::Graph& graph,
                  partitioner::Plan plan, int ranks, const partitioner::StepModel& model) {
  auto step = runtime::plan_step(config, file, graph, plan, ranks, model, /*settled=*/false);
  return {std::move(step), std::move(plan), model};
}

EdgeBytes::EdgeBytes(const graph::Graph& graph, const pipeline::Edge& edge) {
  for (const auto value : edge.values) forward += graph.values[value].meta.nbytes();
  for (const auto value : edge.gradients) backward += graph.values[value].meta.nbytes();
  for (const auto value : edge.replicas) backward += graph.values[value].meta.nbytes();
}

}  // namespace smp::tools
