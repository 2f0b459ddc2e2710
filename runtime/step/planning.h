// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "graph/graph.h"
#include "partitioner/checkpointing.h"
#include "partitioner/plan.h"
#include "runtime/runtime.h"

namespace smp::runtime {

/// A graph with all decisions about it. Internal.
struct PlannedGraph {
  /// In the plan's order, with the costs that its regions give it.
  std::shared_ptr<const graph::Graph> graph;
  /// In the program's order.
  std::shared_ptr<const graph::Graph> captured;
  partitioner::Plan plan;
  /// The regions that run again in the backward pass; empty: nothing.
  partitioner::Regions regions;
  int64_t largest_region = 0;  ///< bytes that it saves
};

/// Plans a captured graph under the configuration and the owners settled so far, for steps of
/// `microbatches`: which stage runs which operators, in which order, and which of them run again in
/// the backward pass. The first plan of a program is collective over the world.
///
/// With `activation_checkpointing: "auto"` the plan is made without the memory limit first; if it
/// needs more, modules are chosen to run again (`partitioner::choose_modules`), and if that does
/// not help, the plan is made anew for all of them. Throws the errors of `partition`, and a
/// `PartitionError` where a plan that was loaded cannot keep the limit.
///
/// Where the limit is the devices' and no plan is predicted to keep it, rank 0 warns, and this and
/// later plans are made without one: a prediction counts all that a step may need.
PlannedGraph make_plan(Runtime& runtime, const std::shared_ptr<const graph::Graph>& graph,
                       int microbatches);

/// The step in which a plan is used, by all of the runtime's ranks; with the regions of a graph.
partitioner::StepModel step_model(const Runtime& runtime, int microbatches);
partitioner::StepModel step_model(const Runtime& runtime, const PlannedGraph& planned,
                                  int microbatches);

/// The predicted time, in us, of a step that runs the graph (which has costs) on `microbatches`,
/// with the plan and schedule that it would get; infinite where there is no such plan. The same on
/// every rank.
double predicted_step_us(const Runtime& runtime, const graph::Graph& graph, int microbatches);

}  // namespace smp::runtime
