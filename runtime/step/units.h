// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "graph/graph.h"
#include "partitioner/plan.h"
#include "partitioner/predict.h"
#include "runtime/step/pipeline_choice.h"

namespace smp::runtime {

/// Divides the stages of a step into the units that its prediction found: `plan` becomes that of
/// the units, and `step` their schedule, which runs the computes of a stage unit by unit where it
/// ran them before. The same on all ranks. `graph` is in the plan's order. Internal.
void divide_into_units(const graph::Graph& graph, const partitioner::StepModel& model,
                       partitioner::Plan& plan, PlannedStep& step);

}  // namespace smp::runtime
