#include "tools/forecast.h"

#include <utility>

#include "pipeline/generators.h"

namespace smp::tools {
namespace {

using graph::Graph;
using partitioner::Plan;
using partitioner::StepModel;
using pipeline::StageCosts;

void add_operators(const Graph& graph, const Plan& plan, StageCosts& costs) {
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const graph::Cost& cost = graph.operators[i].cost;
    costs.forward[plan.stage_of_operator[i]] += cost.forward_us;
    if (graph.trains()) costs.backward[plan.stage_of_operator[i]] += cost.backward_us;
  }
  for (const auto& again : plan.recomputed) {
    costs.forward[again.stage] += graph.operators[again.operator_index].cost.forward_us;
  }
}

/// Each end of a transfer works as long as `predict` says; the message is then there.
void add_transfers(const Graph& graph, const Plan& plan, const std::vector<pipeline::Edge>& edges,
                   StageCosts& costs) {
  const auto on_both_ends = [](std::vector<double>& of, const pipeline::Edge& edge, double us) {
    of[edge.from] += us;
    of[edge.to] += us;
  };
  for (const pipeline::Edge& edge : edges) {
    if (plan.rank_of_stage[edge.from] == plan.rank_of_stage[edge.to]) continue;
    if (edge.values.empty()) continue;
    const double message = partitioner::message_us(/*trains=*/false);
    on_both_ends(costs.forward, edge, message);
    if (graph.trains()) on_both_ends(costs.backward, edge, message);
  }
  for (const auto& hop : plan.transfers) {
    if (plan.rank_of_stage[hop.from] == plan.rank_of_stage[hop.to]) continue;
    const pipeline::Edge edge{hop.from, hop.to, {}, {}, {}};
    const double us =
        partitioner::transfer_us(graph.values[hop.value].meta.nbytes(), /*needs_gradient=*/false);
    on_both_ends(costs.forward, edge, us);
    if (hop.needs_gradient) on_both_ends(costs.backward, edge, us);
  }
}

StageCosts stage_costs(const Graph& graph, const Plan& plan,
                       const std::vector<pipeline::Edge>& edges) {
  StageCosts costs;
  costs.forward.assign(plan.stages(), 0);
  costs.backward.assign(plan.stages(), 0);
  add_operators(graph, plan, costs);
  add_transfers(graph, plan, edges, costs);
  return costs;
}

pipeline::Schedule make_schedule(const Graph& graph, const Plan& plan, const StepModel& step,
                                 const std::vector<pipeline::StageEdge>& edges, int ranks) {
  const auto options = pipeline::ScheduleOptions(plan.stages(), step.microbatches())
                           .ranks(ranks)
                           .rank_of_stage(plan.rank_of_stage)
                           .edges(edges)
                           .active_microbatches(step.active_microbatches());
  const auto order = !graph.trains()      ? pipeline::forward_only(options)
                     : step.interleaved() ? pipeline::interleaved(options)
                                          : pipeline::simple(options);
  return pipeline::lower(order, edges);
}

}  // namespace

partitioner::PartitionOptions partition_options(const Config& config) {
  const auto step = StepModel(static_cast<int>(config.microbatches()))
                        .interleaved(config.pipeline() == "interleaved")
                        .active_microbatches(static_cast<int>(config.active_microbatches()))
                        .optimizer_state(config.optimizer_state_factor());
  return partitioner::PartitionOptions(static_cast<int>(config.partitions()))
      .step(step)
      .memory_weight(config.memory_weight())
      .memory_limit(static_cast<int64_t>(config.memory_limit_mb() * (1 << 20)))
      .auto_partition(config.auto_partition())
      .default_partition(static_cast<int>(config.default_partition()));
}

Forecast forecast(const Graph& graph, Plan plan, const StepModel& step) {
  Forecast result;
  result.step = step;
  result.prediction = partitioner::predict(graph, plan, step);
  result.edges = pipeline::edges_of(graph, plan);
  result.costs = stage_costs(graph, plan, result.edges);
  const auto edges = pipeline::stage_edges(result.edges);
  const auto ranks = static_cast<int>(result.prediction.rank_us.size());
  result.simulation =
      pipeline::simulate(make_schedule(graph, plan, step, edges, ranks), edges, result.costs);
  result.plan = std::move(plan);
  return result;
}

EdgeBytes::EdgeBytes(const Graph& graph, const pipeline::Edge& edge) {
  for (const auto value : edge.values) forward += graph.values[value].meta.nbytes();
  for (const auto value : edge.gradients) backward += graph.values[value].meta.nbytes();
  for (const auto value : edge.replicas) backward += graph.values[value].meta.nbytes();
}

}  // namespace smp::tools
