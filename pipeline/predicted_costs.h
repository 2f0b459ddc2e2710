// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "graph/graph.h"
#include "partitioner/plan.h"
#include "partitioner/predict.h"
#include "pipeline/costs.h"
#include "pipeline/stage.h"

namespace smp::pipeline {

/// The expected costs of the stages of a plan, from the measured or estimated costs of their
/// operators: us for one microbatch, and bytes kept. `prediction` is that of the plan: it says how
/// long each end of a transfer works; the message is then there.
///
/// Half of the backward time of operators that read parameters is for the parameters' gradients: a
/// matrix product has one product for each. A stage that sends no gradient back has nothing to do
/// in the first half.
///
/// Where the prediction has units, the bytes between halves are at least those of a rank that runs
/// each half unit by unit.
StageCosts predicted_costs(const graph::Graph& graph, const partitioner::Plan& plan,
                           const std::vector<Edge>& edges,
                           const partitioner::Prediction& prediction);

}  // namespace smp::pipeline
