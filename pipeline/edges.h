// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "graph/graph.h"
#include "partitioner/plan.h"
#include "pipeline/schedule.h"

namespace smp::pipeline {

/// The values that go over one edge between two stages, besides its direction.
struct Edge {
  int from = 0;
  int to = 0;
  std::vector<graph::ValueId> values;     ///< sent forward
  std::vector<graph::ValueId> requiring;  ///< those of `values` that require a gradient by then
  std::vector<graph::ValueId> unlinked;   ///< those of them from which no gradient goes back
  std::vector<graph::ValueId> gradients;  ///< values whose gradient comes back
  std::vector<graph::ValueId> replicas;   ///< parameters whose gradient comes back only

  /// The gradients that come back, in the order of their message.
  std::vector<graph::ValueId> returning() const;
  bool needs_gradient() const { return !gradients.empty() || !replicas.empty(); }
};

/// The edges of a plan, ordered by (from, to); the same list on every rank.
std::vector<Edge> edges_of(const graph::Graph& graph, const partitioner::Plan& plan);

/// Whether each stage has a backward: it is sent a gradient, a backward starts there, or it owns a
/// parameter that requires one. Stages of frozen layers, to which no gradient flows, have none.
std::vector<bool> backward_of_stage(const graph::Graph& graph, const partitioner::Plan& plan,
                                    const std::vector<Edge>& edges);

/// The same edges as the schedule knows them.
std::vector<StageEdge> stage_edges(const std::vector<Edge>& edges);

}  // namespace smp::pipeline
