// SPDX-License-Identifier: Apache-2.0
#include "tools/forecast.h"

#include <utility>

#include "core/check.h"

namespace smp::tools {

partitioner::StepModel step_model(const Config& config, const graph::SavedGraph& saved, int ranks,
                                  int microbatches, int replicas) {
  SMP_CHECK_WITH(
      ConfigError, config.cost_model() != "measured",
      "smp_plan runs nothing, and \"cost_model\": \"measured\" asks it to measure. Give the "
      "file with what a run of the program measured: it logs the text");
  auto step = runtime::step_model(config, ranks, microbatches, replicas)
                  .costs(runtime::read_costs(config, saved.graph.device()));
  if (!config.is_set("optimizer_state_factor")) step.optimizer_states(saved.optimizer_state);
  return step;
}

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
