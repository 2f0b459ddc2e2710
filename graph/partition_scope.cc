// SPDX-License-Identifier: Apache-2.0
#include "graph/partition_scope.h"

namespace smp::graph {
namespace {

thread_local int innermost_partition = -1;

}  // namespace

int current_partition() { return innermost_partition; }

PartitionScope::PartitionScope(int partition) : outer_(innermost_partition) {
  innermost_partition = partition;
}

PartitionScope::~PartitionScope() { innermost_partition = outer_; }

}  // namespace smp::graph
