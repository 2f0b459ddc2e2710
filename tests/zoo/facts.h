// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "graph/graph.h"
#include "partitioner/plan.h"

namespace smp::zoo {

/// The row of a graph in the table of docs/zoo.md.
struct Facts {
  size_t operators = 0;
  int64_t parameters = 0;      ///< elements that the graph reads
  std::string stages;          ///< operators of each stage: "12 / 9 / 14"
  std::string ranks;           ///< ranks of the stages: "0 1 0"
  double balance = 1;          ///< time of the slowest rank over the mean
  int64_t forward_bytes = 0;   ///< that cross between ranks, of one microbatch
  int64_t backward_bytes = 0;  ///< gradients that come back
};

/// Facts of the graph and a plan for it in program order, with costs estimated from shapes: the
/// same facts each time.
Facts facts_of(graph::Graph graph, const partitioner::Plan& plan);

/// The same with the plan that the partitioner makes for such costs.
Facts facts_of(graph::Graph graph, int stages);

}  // namespace smp::zoo
