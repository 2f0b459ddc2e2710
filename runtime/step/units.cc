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

/// Elements of divided parameters that the units read on the ranks that own them; elsewhere they
/// are whole.
std::vector<pipeline::StageReads> reads_of(const graph::Graph& graph,
                                           const partitioner::StepModel& model,
                                           const partitioner::Plan& plan,
                                           const std::vector<pipeline::Edge>& edges) {
  const pipeline::PartitionedGraph partitioned(graph, plan, edges);
  std::vector<pipeline::StageReads> reads;
  for (int stage = 0; stage < plan.stages(); ++stage) {
    const auto elements = [&](const std::vector<graph::ValueId>& parameters) {
      int64_t sum = 0;
      for (graph::ValueId id : parameters) {
        const graph::Value& value = graph.values[id];
        const int owner = plan.rank_of_stage[plan.owner.at(value.name)];
        const bool is_gathered =
            owner == plan.rank_of_stage[stage] && model.sharding().divides(value);
        if (is_gathered) sum += value.meta.numel();
      }
      return sum;
    };
    const pipeline::StageProgram program(partitioned, stage);
    reads.push_back(
        {elements(program.read_in_forward()), elements(program.read_in_backward(model.regions()))});
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

void divide_into_units(const graph::Graph& graph, const partitioner::StepModel& model,
                       partitioner::Plan& plan, PlannedStep& step) {
  partitioner::Plan units =
      partitioner::divided_into_units(graph, plan, step.prediction.units.of_operator);
  step.edges = pipeline::edges_of(graph, units);
  // The bytes of parameters are those of the stages.
  const auto prediction =
      partitioner::predict(graph, units, partitioner::StepModel(model).sharding({}));
  step.units = StepUnits{stage_of_unit(plan, units),
                         pipeline::backward_of_stage(graph, units, step.edges),
                         reads_of(graph, model, units, step.edges),
                         model.sharding().live(),
                         pipeline::stage_edges(step.edges),
                         pipeline::predicted_costs(graph, units, step.edges, prediction)};
  plan = std::move(units);
}

pipeline::RankedSchedule schedule_of_units(const pipeline::RankedSchedule& stages,
                                           const StepUnits& units) {
  const auto order =
      pipeline::order_of_units(stages.schedule, units.stage_of_unit, units.backward_of_unit);
  auto schedule =
      pipeline::with_unsharding(pipeline::lower(order, units.edges), units.reads, units.live);
  auto simulation = pipeline::simulate(schedule, units.edges, units.costs);
  return {stages.name, std::move(schedule), std::move(simulation)};
}

}  // namespace smp::runtime
