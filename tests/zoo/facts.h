#pragma once

#include <cstdint>
#include <string>

#include "graph/graph.h"

namespace smp::zoo {

/// What the table of docs/zoo.md says of a graph.
struct Facts {
  size_t operators = 0;
  int64_t parameters = 0;      ///< elements that the graph reads
  std::string stages;          ///< operators of each stage: "12 / 9 / 14"
  double balance = 1;          ///< time of the slowest stage over the mean
  int64_t forward_bytes = 0;   ///< that cross between stages, of one microbatch
  int64_t backward_bytes = 0;  ///< gradients that come back
};

/// Partitions the graph into `stages`, with costs estimated from shapes: the same facts each time.
Facts facts_of(graph::Graph graph, int stages);

}  // namespace smp::zoo
