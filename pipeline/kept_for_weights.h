// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "graph/graph.h"
#include "partitioner/plan.h"
#include "pipeline/edges.h"

namespace smp::pipeline {

/// Bytes that one microbatch keeps on a stage between the halves of its backward
/// (`graph::SplitBackward`).
struct KeptForWeights {
  double saved = 0;      ///< tensors that operators saved in the forward
  double gradients = 0;  ///< those that the second half starts from
};

/// The same for each stage. Counts storages, each once: a view of a weight is the weight's, and the
/// gradient of a sum is that of its terms.
std::vector<KeptForWeights> kept_for_weights(const graph::Graph& graph,
                                             const partitioner::Plan& plan,
                                             const std::vector<Edge>& edges);

}  // namespace smp::pipeline
