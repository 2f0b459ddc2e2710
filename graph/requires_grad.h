// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <vector>

#include "graph/graph.h"

namespace smp::graph {

/// From when on the values of a graph require grad. `TensorMeta::requires_grad` tells the state
/// when they were made, but in-place writes are seen through views: after `out[0].copy_(w)` the
/// tensor `out` requires grad. A tensor that is written under no_grad keeps its history.
class RequiresGrad {
 public:
  static constexpr int kNever = std::numeric_limits<int>::max();

  explicit RequiresGrad(const Graph& graph);

  /// The operator after which the value requires grad: its producer, or the first one that writes
  /// something that does to it; -1: from the start; kNever.
  int since(ValueId value) const { return since_[value]; }

  /// One of the values that autograd links to this one by views, the same for all of them.
  ValueId family(ValueId value) const { return family_[value]; }

 private:
  void find_families(const Graph& graph);
  void find_since(const Graph& graph);
  ValueId root(ValueId value);

  std::vector<ValueId> family_;
  std::vector<int> since_;
};

/// True if some result of the operator requires grad when it is made.
bool result_requires_grad(const Graph& graph, const Operator& op);

/// True if the operator records a backward function for some result.
bool records_history(const Graph& graph, const Operator& op);

/// True if the operator, under no_grad, makes a view of a tensor that requires grad: so does the
/// view, but no gradient goes back through it.
bool ends_history(const Graph& graph, const Operator& op);

/// True if such an operator made the value: it requires grad, but has no place in the history.
/// libtorch refuses its use once its memory is written.
bool is_unlinked(const Graph& graph, ValueId value);

/// True if autograd takes the value for a view: the history of a write through it is that of the
/// tensor it is a view of.
bool is_view(const Graph& graph, ValueId value);

/// The value and its earlier ids: those of the same tensor before an operator returned it with
/// unchanged history, which is one that does nothing (`to` its own type) or a write under no_grad.
std::vector<ValueId> with_earlier_names(const Graph& graph, ValueId value);

}  // namespace smp::graph
