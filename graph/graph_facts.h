// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "graph/alias_analysis.h"
#include "graph/autocast.h"
#include "graph/differentiate.h"
#include "graph/graph.h"
#include "graph/late_writes.h"
#include "graph/weight_fusion.h"

namespace smp::graph {

/// Facts of a graph that segments of it need, and that take a walk over all of it: found once and
/// shared by those segments, since a graph may have hundreds. The graph outlives them.
struct GraphFacts {
  /// Implicit: a segment of all operators shares them with no other.
  GraphFacts(const Graph& graph)  // NOLINT(google-explicit-constructor)
      : graph(graph),
        aliases(graph),
        late_writes(graph),
        separated(sets_to_separate(graph)),
        uses(uses_of_storages(graph)),
        autocast_scopes(graph::autocast_scopes(graph)),
        weights_to_cast(graph::weights_to_cast(graph)),
        differentiated(differentiated_ranges(graph)) {}

  const Graph& graph;
  const AliasAnalysis aliases;
  const LateWrites late_writes;                             ///< before the first operator
  const std::vector<int> separated;                         ///< see `sets_to_separate`
  const std::vector<int> uses;                              ///< see `uses_of_storages`
  const std::vector<int> autocast_scopes;                   ///< see the function of this name
  const std::vector<std::vector<ValueId>> weights_to_cast;  ///< the same
  const std::vector<DifferentiatedRange> differentiated;    ///< see `differentiated_ranges`
};

}  // namespace smp::graph
