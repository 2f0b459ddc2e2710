// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "graph/graph.h"
#include "partitioner/plan.h"
#include "partitioner/predict.h"
#include "runtime/step/pipeline_choice.h"

namespace smp::runtime {

/// Divides the stages of a step into the units that its prediction found: `plan` and `step.edges`
/// become those of the units, and `step.units` tells how schedules run them. Its schedule stays one
/// of stages. The same on all ranks. `graph` is in the plan's order. Internal.
void divide_into_units(const graph::Graph& graph, const partitioner::StepModel& model,
                       partitioner::Plan& plan, PlannedStep& step);

/// The schedule that runs the computes of a stage unit by unit where `stages` runs them, with the
/// actions that gather and free parameters. Internal.
pipeline::RankedSchedule schedule_of_units(const pipeline::RankedSchedule& stages,
                                           const StepUnits& units);

}  // namespace smp::runtime
