// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "graph/graph.h"
#include "partitioner/plan.h"
#include "partitioner/predict.h"

namespace smp::partitioner {

/// A table of the plan for people: per stage the modules, operators, parameters, memory, share of
/// time and sent values; then the balance, the values that several stages share, and the prediction
/// of the step. The first line starts with "Partition assignments:". Ends with a newline.
std::string report(const graph::Graph& graph, const Plan& plan, const StepModel& step);

}  // namespace smp::partitioner
