// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "graph/graph.h"
#include "partitioner/partition.h"
#include "partitioner/plan.h"

namespace smp::partitioner {

/// Partitions like `partition`, and finds the order in which the operators run: that of the
/// program, or another legal one (`order_rules`) where the predicted step is shorter by more than 2
/// %. The plan is for `reordered(graph, plan.order)`.
///
/// With `owner` settled, the order may also be that of `order_by_owner`: where it visits a rank
/// fewer times, or reads fewer bytes from other ranks. With `previous`, its order is kept together
/// with its cuts unless another plan is shorter by more than `keep`. Where anything is pinned by
/// the user, operators run as they were called.
Plan partition_in_best_order(const graph::Graph& graph, const PartitionOptions& options);

}  // namespace smp::partitioner
