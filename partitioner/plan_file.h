// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "graph/graph.h"
#include "partitioner/plan.h"

namespace smp::partitioner {

/// A plan as JSON that a person can read and edit: for each stage its partition, its operators as a
/// range (or, in another order than the program's, several) with the first and the last one's name
/// and module, and the owners of parameters and buffers. Transfers, and all else, follow from
/// these. `graph` is as it was captured. Format: docs/partitioning.md.
std::string plan_to_json(const graph::Graph& graph, const Plan& plan);

/// The plan in `text`, for this graph. Operators must be as many as, and called at the ends of the
/// stages as, those of the graph for which the plan was made; shapes and costs may differ. Errors
/// call the text `source_name`.
///
/// Throws `ConfigError` for text that is not such JSON; `PartitionError` if the plan is for another
/// graph (with the first difference) or another number of partitions, if operators are in an order
/// in which they cannot run, or if a stage ends at an illegal cut.
Plan plan_from_json(const graph::Graph& graph, const std::string& text, int partitions,
                    const std::string& source_name);

}  // namespace smp::partitioner
