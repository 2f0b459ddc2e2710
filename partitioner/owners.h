#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace smp::partitioner {

/// An operator that must run on one stage because that stage owns what it reads or writes.
struct Pin {
  int operator_index = 0;
  int stage = 0;
  graph::ValueId value = graph::kUndefined;
};

/// What settled owners ask of a graph.
struct OwnerConstraints {
  std::vector<Pin> pins;                     ///< by operator
  std::vector<graph::ValueId> better_local;  ///< not pinned: reads elsewhere become replicas
};

/// A parameter that gets a gradient pins the first operator that reads it, a parameter or buffer
/// that is written the one that writes it. Throws `PartitionError` if an owner is not a stage.
OwnerConstraints owner_constraints(const graph::Graph& graph,
                                   const std::map<std::string, int>& owner, int stages);

}  // namespace smp::partitioner
