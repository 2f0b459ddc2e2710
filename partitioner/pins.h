// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace smp::partitioner {

/// Which rank of the pipeline ("partition") owns or is to own a parameter or buffer, by name.
using Owners = std::map<std::string, int>;

/// Why an operator must run on a certain rank.
enum class PinSource {
  kScope,      ///< an `smp::partition` scope was alive where it was called
  kParameter,  ///< it reads a parameter that is pinned by name
  kOwner,      ///< that rank owns the tensor it reads or writes, since an earlier step function
  kDefault,    ///< without automatic partitioning: it reads a parameter that nothing pins, or
               ///< comes before all pins
};

/// An operator that must run on one rank.
struct Pin {
  int operator_index = 0;
  int rank = 0;
  PinSource source = PinSource::kScope;
  graph::ValueId value = graph::kUndefined;  ///< the parameter or buffer concerned, if any
};

/// A few words for a plan's reasons: "parameter fc.weight is pinned to partition 1".
std::string reason(const graph::Graph& graph, const Pin& pin);
/// A clause for error texts that names the operator, too.
std::string describe(const graph::Graph& graph, const Pin& pin);

/// The demands of pins and settled owners on a graph.
struct Constraints {
  std::vector<Pin> pins;                     ///< pins by operator, at most one for each
  std::vector<graph::ValueId> better_local;  ///< not pinned: reads elsewhere become replicas
};

/// The input from which the constraints follow.
struct PinRequest {
  int ranks = 1;
  const Owners* owner = nullptr;   ///< settled by an earlier plan
  const Owners* pinned = nullptr;  ///< owners that the user pinned
  int default_rank = -1;           ///< rank of parameters that nothing pins; -1: anywhere
};

/// Pins every operator
///   1. that reads a parameter pinned by name, directly or through a view: on its partition;
///   2. that was called under an `smp::partition` scope: on that partition, even if it reads a
///      parameter pinned elsewhere, as long as it is not the first to read it;
///   3. that is the first to read a parameter with an owner that gets a gradient, or that writes
///      an owned tensor: on the owner;
///   4. that reads any other parameter, if there is a default: on the owner, or the default.
///
/// Throws `PartitionError` if two of these contradict each other, or name no rank.
Constraints find_constraints(const graph::Graph& graph, const PinRequest& request);

}  // namespace smp::partitioner
