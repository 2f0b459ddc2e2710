// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "graph/graph.h"
#include "partitioner/partition.h"
#include "partitioner/plan.h"
#include "runtime/job.h"

namespace smp::runtime {

/// The first plan of a program under the configuration's `partition_file` and `load_partition`: the
/// file's plan, or one that is computed, with the file's (if it is of this graph) as the previous
/// one, and saved there by world rank 0. Collective over the world: rank 0 reads the file for all.
/// Throws the errors of `partition` and `plan_from_json`, on every rank; `ConfigError` if there is
/// nothing to load, or the file cannot be written.
partitioner::Plan plan_by_file(const Job& job, const graph::Graph& graph,
                               partitioner::PartitionOptions options);

}  // namespace smp::runtime
