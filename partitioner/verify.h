// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "graph/graph.h"
#include "partitioner/plan.h"

namespace smp::partitioner {

/// Checks that a plan can be executed: stages are contiguous and in order, every cut is legal,
/// every value used on a stage other than its producer's gets there along one chain and no other
/// value travels, and owners, replicas, outputs and roots are where their users expect them.
/// Written apart from the makers of plans. Throws `Error` with the first violation.
void verify_plan(const graph::Graph& graph, const Plan& plan);

}  // namespace smp::partitioner
