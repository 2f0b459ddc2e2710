// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "graph/graph.h"
#include "partitioner/checkpointing.h"
#include "partitioner/plan.h"
#include "partitioner/predict.h"
#include "runtime/parameters/parameter_shards.h"
#include "runtime/step/pipeline_choice.h"
#include "smp/config.h"

namespace smp::runtime {

/// Divides the stages of a step into units, of which each rank gathers the parameters that replicas
/// divide (`partitioner::find_units`): `plan` becomes that of the units, and `step` their schedule,
/// which runs the computes of a stage unit by unit where it ran them before. The same on all ranks.
/// `graph` is in the plan's order. Internal.
void divide_into_units(const Config& config, const ParameterShards& sharding,
                       const graph::Graph& graph, const partitioner::Regions& regions,
                       const partitioner::StepModel& model, partitioner::Plan& plan,
                       PlannedStep& step);

}  // namespace smp::runtime
