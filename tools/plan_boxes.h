// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "partitioner/plan.h"

namespace smp::tools {

/// Neighbouring operators of one stage that belong to one module, or to several in a row.
struct Box {
  int stage = 0;
  std::string name;  ///< "blocks.3.attention", "blocks.0-2" or "(step function)"
  int first = 0;     ///< operators [first, last]
  int last = 0;
  double share = 0;  ///< part of the whole graph's time; of its operators if no time was measured

  int operators() const { return last - first + 1; }
};

/// Values that go from one box to another for every microbatch.
struct BoxEdge {
  int from = 0;
  int to = 0;
  int tensors = 0;
  int64_t bytes = 0;
  int64_t gradient_bytes = 0;  ///< that come back
};

/// The content of a picture of a plan: at most about `limit` boxes, in program order.
struct Boxes {
  std::vector<Box> boxes;
  std::vector<int> box_of_operator;
  std::vector<BoxEdge> inside;   ///< between boxes of one stage, along the data
  std::vector<BoxEdge> between;  ///< between stages, along the plan's transfers

  /// The boxes that touch value `value` in a stage, ascending; its producer counts.
  std::vector<int> touching(const graph::Graph& graph, graph::ValueId value, int stage) const;
};

/// Groups the operators by module, as deep in the tree of modules as `limit` allows; where even
/// the outermost modules of a level are too many, neighbours of one parent share a box.
Boxes make_boxes(const graph::Graph& graph, const partitioner::Plan& plan, size_t limit = 60);

}  // namespace smp::tools
