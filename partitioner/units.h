// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "graph/graph.h"
#include "partitioner/plan.h"

namespace smp::partitioner {

/// How stages are divided into units, whose divided parameters are gathered together: the stages of
/// a rank that holds shards of parameters (`sharded_data_parallel_degree`). While one unit computes
/// the next one is gathered.
struct UnitOptions {
  /// Whether replicas divide a parameter.
  std::function<bool(const graph::Value& parameter)> divides;
  /// Elements of divided parameters that a unit reads at most, unless no legal cut makes it smaller
  /// (`sdp_max_live_parameters`).
  int64_t most_elements = 0;
};

/// The stage of each operator when every stage is divided into units: a unit ends at the first
/// legal cut behind its second divided parameter, or earlier where it would read more than
/// `most_elements`. No cut divides a region that runs again. `regions`: per operator, or empty. The
/// numbers ascend with the operators.
std::vector<int> find_units(const graph::Graph& graph, const std::vector<int>& stage_of_operator,
                            const std::vector<int>& regions, const UnitOptions& options);

/// The plan whose stages are these units, on the ranks of the stages that they are of. A stage
/// without operators is one unit.
Plan divided_into_units(const graph::Graph& graph, const Plan& plan,
                        const std::vector<int>& unit_of_operator);

/// The divided parameters that each unit reads, in the order of their first use there.
std::vector<std::vector<graph::ValueId>> parameters_of_units(
    const graph::Graph& graph, const std::vector<int>& unit_of_operator,
    const UnitOptions& options);

}  // namespace smp::partitioner
