// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/units.h"

#include <utility>
#include <vector>

#include "partitioner/units.h"
#include "pipeline/generators.h"
#include "pipeline/predicted_costs.h"
#include "pipeline/stage_program.h"
#include "pipeline/unsharding.h"

namespace smp::runtime {
namespace {

std::vector<pipeline::StageReads> reads_of(const ParameterShards& sharding,
                                           const graph::Graph& graph,
                                           const partitioner::Regions& regions,
                                           const partitioner::Plan& plan,
                                           const std::vector<pipeline::Edge>& edges) {
  const auto elements = [&](const std::vector<graph::ValueId>& parameters) {
    int64_t sum = 0;
    for (graph::ValueId id : parameters) {
      if (sharding.divides(graph.values[id].name)) sum += graph.values[id].meta.numel();
    }
    return sum;
  };
  std::vector<pipeline::StageReads> reads;
  for (int stage = 0; stage < plan.stages(); ++stage) {
    const pipeline::StageProgram program(graph, plan, edges, stage);
    reads.push_back(
        {elements(program.read_in_forward()), elements(program.read_in_backward(regions))});
  }
  return reads;
}

/// The stage of each unit, which are the plan's in their order.
std::vector<int> stage_of_unit(const partitioner::Plan& plan, const partitioner::Plan& units) {
  std::vector<int> stages(units.stages(), -1);
  for (size_t i = 0; i < plan.stage_of_operator.size(); ++i) {
    stages[units.stage_of_operator[i]] = plan.stage_of_operator[i];
  }
  int before = -1;
  for (int& stage : stages) before = stage = stage < 0 ? before + 1 : stage;
  return stages;
}

}  // namespace

void divide_into_units(const Config& config, const ParameterShards& sharding,
                       const graph::Graph& graph, const partitioner::Regions& regions,
                       const partitioner::StepModel& model, partitioner::Plan& plan,
                       PlannedStep& step) {
  const int64_t most = config.sdp_max_live_parameters();
  const auto divides = [&](const graph::Value& value) { return sharding.divides(value.name); };
  partitioner::Plan units = partitioner::divided_into_units(
      graph, plan,
      partitioner::find_units(graph, plan.stage_of_operator, regions, {divides, most}));
  step.edges = pipeline::edges_of(graph, units);
  const auto edges = pipeline::stage_edges(step.edges);
  const auto order = pipeline::order_of_units(step.schedule, stage_of_unit(plan, units),
                                              backward_of_stage(graph, units, step.edges));
  step.schedule = pipeline::with_unsharding(
      pipeline::lower(order, edges), reads_of(sharding, graph, regions, units, step.edges), most);
  step.prediction = partitioner::predict(graph, units, model);
  const auto costs = pipeline::predicted_costs(graph, units, step.edges, step.prediction);
  step.simulation = pipeline::simulate(step.schedule, edges, costs);
  plan = std::move(units);
}

}  // namespace smp::runtime
