#pragma once

#include <limits>
#include <vector>

#include "graph/graph.h"

namespace smp::partitioner {

/// Which values a backward pass from the graph's roots gives a gradient, found statically: one
/// pass forward (what requires grad, and from when on), one backward (what a root depends on).
///
/// In-place writes are seen through views: after `out[0].copy_(w)` the tensor `out` requires grad
/// although it did not when it was made, and a root that depends on `out` depends on `w`.
class GradientFlow {
 public:
  static constexpr int kNever = std::numeric_limits<int>::max();

  explicit GradientFlow(const graph::Graph& graph);

  /// The operator after which the value requires grad: its producer, or the first one that writes
  /// something that does to it; -1: from the start; kNever.
  int requires_grad_since(graph::ValueId value) const { return since_[value]; }

  /// The last operator that sends a gradient back to the value (a root counts as one, where its
  /// backward starts); -1 if there is none.
  int last_gradient_use(graph::ValueId value) const { return last_use_[value]; }

  /// True if the operator sends gradients back to its arguments.
  bool differentiated(int operator_index) const { return differentiated_[operator_index]; }

  /// True if `operator_index` sends a gradient back to its argument `value`.
  bool has_gradient(graph::ValueId value, int operator_index) const {
    return differentiated_[operator_index] && since_[value] < operator_index;
  }

 private:
  void find_families(const graph::Graph& graph);
  int family(graph::ValueId value);
  void find_requires_grad(const graph::Graph& graph);
  void find_dependencies(const graph::Graph& graph);
  bool reached(const graph::Graph& graph, const graph::Operator& op);
  void mark(const graph::Graph& graph, graph::ValueId value, int operator_index);

  std::vector<graph::ValueId> parent_;  ///< union-find over values that autograd links by views
  std::vector<int> since_;
  std::vector<int> last_use_;
  std::vector<bool> family_reached_;
  std::vector<bool> differentiated_;
};

}  // namespace smp::partitioner
