// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace smp::partitioner {

/// Which rank of the pipeline ("partition") owns or is to own a parameter or buffer, by name.
using Owners = std::map<std::string, int>;

struct PartitionOptions;

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
  int stage = 0;                             ///< the one that it is in, see `list_stages`
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

/// Pins every operator
///   1. that reads a parameter pinned by name, directly or through a view: on its partition;
///   2. that was called under an `smp::partition` scope: on that partition, even if it reads a
///      parameter pinned elsewhere, as long as it is not the first to read it;
///   3. that is the first to read a parameter with an owner that gets a gradient, or that writes
///      an owned tensor: on the owner;
///   4. without automatic partitioning, that reads any other parameter: on the owner, or the
///      default partition.
///
/// Throws `PartitionError` if two of these contradict each other, or name no rank.
Constraints find_constraints(const graph::Graph& graph, const PartitionOptions& options);

/// The rank of each stage of a pipeline, in program order; sets the stage of each pin.
///
/// A stage for each run of pins on one rank, so that a rank to which the pins return has several;
/// and one for each rank that no pin names, placed so that ranks ascend where they can: before the
/// first place where a lower rank is followed by a higher one, else at the end. Without pins: one
/// stage for each rank.
///
/// `placement` is the wanted rank of each stage (a rank may have several), empty for none. It is
/// followed if the pins can be kept in it: each is then in the first of its rank's stages that is
/// not before the pins before it.
std::vector<int> list_stages(std::vector<Pin>& pins, int ranks,
                             const std::vector<int>& placement = {});

}  // namespace smp::partitioner
