// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "partitioner/plan.h"

namespace smp::partitioner {

/// Derives the rest of a plan from the rank of each stage and the stage of each operator, which
/// must not decrease in program order: transfers, recomputed operators in their place, replicas,
/// owners, and the stages of outputs and roots. `fixed_owner` names the ranks of the owners that
/// are settled already; any other parameter or buffer belongs to the stage that writes it, or else
/// to the first that reads it. Does not judge the cuts: see `verify_plan`.
Plan complete_plan(const graph::Graph& graph, std::vector<int> rank_of_stage,
                   std::vector<int> stage_of_operator,
                   const std::map<std::string, int>& fixed_owner);

}  // namespace smp::partitioner
