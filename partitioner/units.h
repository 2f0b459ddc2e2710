// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "graph/graph.h"
#include "partitioner/plan.h"
#include "partitioner/replica_sharding.h"

namespace smp::partitioner {

/// The parts into which the stages of a plan are divided where replicas divide parameters
/// (`sharded_data_parallel_degree`): a unit's are gathered together. While one unit computes the
/// next one is gathered.
struct Units {
  std::vector<int> of_operator;  ///< the unit of each operator, ascending
  /// The divided parameters that each unit reads and its rank owns, in the order of their first use
  /// there. Another owner's is a copy, which is whole in any case.
  std::vector<std::vector<graph::ValueId>> parameters;

  int count() const { return static_cast<int>(parameters.size()); }
};

/// Finds the units of a plan. One ends at the first legal cut behind which it reads twice as many
/// elements as a typical parameter has (the mean over all elements of divided parameters, for which
/// small ones hardly count), or earlier where it would read more than half of `sharding.live()`, so
/// that the next one finds room beside it. No cut divides a region that runs again. `regions`: per
/// operator, or empty.
Units find_units(const graph::Graph& graph, const Plan& plan, const std::vector<int>& regions,
                 const ReplicaSharding& sharding);

/// Per rank, the most bytes of divided parameters that are whole at one time: those of two units,
/// as far as `sharding.live()` admits both. Any two may follow each other under some schedule: a
/// backward may read nothing of the units between.
std::vector<int64_t> gathered_bytes(const graph::Graph& graph, const Plan& plan, const Units& units,
                                    const ReplicaSharding& sharding);

/// The plan whose stages are these units, on the ranks of the stages that they are of. A stage
/// without operators is one unit.
Plan divided_into_units(const graph::Graph& graph, const Plan& plan,
                        const std::vector<int>& unit_of_operator);

}  // namespace smp::partitioner
