// SPDX-License-Identifier: Apache-2.0
#include "graph/partition_scope.h"

namespace smp::graph {
namespace {

thread_local int innermost = -1;

}  // namespace

int current_partition() { return innermost; }

PartitionScope::PartitionScope(int partition) : outer_(innermost) { innermost = partition; }

PartitionScope::~PartitionScope() { innermost = outer_; }

}  // namespace smp::graph
