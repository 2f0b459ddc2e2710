#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "partitioner/partition.h"
#include "partitioner/plan.h"
#include "partitioner/predict.h"
#include "pipeline/simulator.h"
#include "pipeline/stage.h"
#include "smp/core/config.h"

namespace smp::tools {

/// Everything that can be said of a plan without running it. Times are in us.
struct Forecast {
  partitioner::Plan plan;
  partitioner::StepModel step;
  partitioner::Prediction prediction;  ///< time and memory of each stage
  std::vector<pipeline::Edge> edges;
  /// Per stage, of one microbatch: its operators and its ends of the transfers.
  pipeline::StageCosts costs;
  /// The schedule, run with these costs.
  pipeline::Simulation simulation;

  int ranks() const { return static_cast<int>(simulation.busy.size()); }
  double step_us() const { return simulation.makespan; }
};

/// How the configuration asks to partition, and for which step.
partitioner::PartitionOptions partition_options(const Config& config);

/// Makes the schedule of the plan and runs it in virtual time. `graph` is in the plan's order.
Forecast forecast(const graph::Graph& graph, partitioner::Plan plan,
                  const partitioner::StepModel& step);

/// Bytes that go over an edge for each microbatch.
struct EdgeBytes {
  int64_t forward = 0;
  int64_t backward = 0;

  EdgeBytes(const graph::Graph& graph, const pipeline::Edge& edge);
};

}  // namespace smp::tools
