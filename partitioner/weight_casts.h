// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "graph/graph.h"

namespace smp::partitioner {

/// The copy of a weight in lower precision that a stage under autocast makes in a step, and keeps
/// for all microbatches (`graph::WeightCasts`).
struct WeightCast {
  int64_t bytes = 0;
  std::vector<int> operators;  ///< those that read it, ascending
};

/// Those that a graph may make.
std::vector<WeightCast> weight_casts(const graph::Graph& graph);

}  // namespace smp::partitioner
