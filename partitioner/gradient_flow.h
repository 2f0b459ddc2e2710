#pragma once

#include <limits>
#include <vector>

#include "graph/graph.h"

namespace smp::partitioner {

/// Which values a backward pass from the graph's roots gives a gradient, found statically: one
/// pass forward (what requires grad, and from when on), one backward (what a root depends on).
///
/// In-place writes are seen through views: after `out[0].copy_(w)` the tensor `out` requires grad
/// although it did not when it was made, and a root that depends on `out` depends on `w`. A tensor
/// that is written under no_grad keeps its history.
class GradientFlow {
 public:
  static constexpr int kNever = std::numeric_limits<int>::max();

  explicit GradientFlow(const graph::Graph& graph);

  /// The operator after which the value requires grad: its producer, or the first one that writes
  /// something that does to it; -1: from the start; kNever.
  int requires_grad_since(graph::ValueId value) const { return since_[value]; }

  /// The operators that send a gradient back to their argument `value`, descending. A backward
  /// root counts as one, where its backward starts.
  const std::vector<int>& gradient_uses(graph::ValueId value) const { return uses_[value]; }

 private:
  void find_families(const graph::Graph& graph);
  int family(graph::ValueId value);
  void find_requires_grad(const graph::Graph& graph);
  void find_dependencies(const graph::Graph& graph);
  bool reached(const graph::Graph& graph, int operator_index);
  void mark(const graph::Graph& graph, graph::ValueId value, int operator_index);
  void mark_same_tensors(const graph::Graph& graph, int operator_index);

  std::vector<graph::ValueId> parent_;  ///< union-find over values that autograd links by views
  std::vector<int> since_;
  std::vector<std::vector<int>> uses_;
  std::vector<int> earliest_reached_;  ///< per family, the first producer of a reached value
};

}  // namespace smp::partitioner
