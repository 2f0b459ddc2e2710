// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "graph/graph.h"
#include "graph/serialize.h"
#include "partitioner/plan.h"
#include "partitioner/predict.h"
#include "pipeline/stage.h"
#include "runtime/step/pipeline_choice.h"
#include "smp/config.h"

namespace smp::tools {

/// Everything that can be said of a plan without running it.
struct Forecast : runtime::PlannedStep {
  partitioner::Plan plan;
  partitioner::StepModel model;

  int ranks() const { return static_cast<int>(simulation.busy.size()); }
  double step_us() const { return simulation.makespan; }
};

/// Makes the schedule of the plan and runs it in virtual time. `file` is the result of
/// `read_schedule`; `graph` is in the plan's order.
Forecast forecast(const Config& config, const std::string& file, const graph::Graph& graph,
                  partitioner::Plan plan, int ranks, const partitioner::StepModel& model);

/// The same as `runtime::step_model`, with the costs of the file that `cost_model` names and,
/// unless the configuration sets `optimizer_state_factor`, the optimizer's state of the run that
/// saved the graph. Throws `ConfigError` where it asks to measure, since nothing runs.
partitioner::StepModel step_model(const Config& config, const graph::SavedGraph& saved, int ranks,
                                  int microbatches, int replicas);

/// Bytes that go over an edge for each microbatch.
struct EdgeBytes {
  int64_t forward = 0;
  int64_t backward = 0;

  EdgeBytes(const graph::Graph& graph, const pipeline::Edge& edge);
};

}  // namespace smp::tools
