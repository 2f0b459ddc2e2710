// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "graph/differentiate.h"
#include "graph/graph.h"
#include "graph/requires_grad.h"

namespace smp::partitioner {

/// Which values a backward pass from the graph's roots gives a gradient, found statically: one pass
/// forward (values that require grad, and since when: `graph::RequiresGrad`), one backward (values
/// that a root depends on).
///
/// In-place writes are seen through views: after `out[0].copy_(w)` a root that depends on `out`
/// depends on `w`.
class GradientFlow {
 public:
  static constexpr int kNever = graph::RequiresGrad::kNever;

  explicit GradientFlow(const graph::Graph& graph);

  /// See `graph::RequiresGrad::since`.
  int requires_grad_since(graph::ValueId value) const { return requires_grad_.since(value); }

  /// The operators that send a gradient back to their argument `value`, descending. A backward
  /// root counts as one, where its backward starts.
  const std::vector<int>& gradient_uses(graph::ValueId value) const { return uses_[value]; }

 private:
  void mark_read_in(const graph::Graph& graph, const graph::DifferentiatedRange& range);
  bool reached(const graph::Graph& graph, int operator_index);
  void mark(const graph::Graph& graph, graph::ValueId value, int operator_index);
  void mark_same_tensors(const graph::Graph& graph, int operator_index);

  graph::RequiresGrad requires_grad_;
  std::vector<std::vector<int>> uses_;
  std::vector<int> earliest_reached_;  ///< per family, the first producer of a reached value
};

}  // namespace smp::partitioner
