// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "graph/graph.h"

namespace smp::graph {

/// The operator
///
///   smp::grad(Tensor[] outputs, Tensor[] gradients, Tensor[] inputs, bool keep_graph,
///             bool create_graph) -> Tensor[]
///
/// which stands in a graph where the step function called `torch::autograd::grad`, and calls it: on
/// the history that the operators before it have recorded in the same stage. The gradient of an
/// input that no output depends on is undefined.
const c10::OperatorHandle& grad_operator();

/// The operator
///
///   smp::requires_grad(Tensor(a) self, bool on) -> Tensor(a)
///
/// which stands in a graph where the step function called `requires_grad_` on a tensor of its own:
/// an alias without history that requires a gradient, or none.
const c10::OperatorHandle& requires_grad_operator();

/// The operators `first` to `last`, of which `last` is `smp::grad` and `first` the first one that
/// reads the values with respect to which it differentiates, or makes them by a write. They run on
/// one stage, and once, since `last` needs the history that they record.
struct DifferentiatedRange {
  int first;
  int last;
};

/// The values with respect to which an `smp::grad` with these arguments differentiates, by all
/// names.
std::vector<ValueId> differentiated(const Graph& graph, const std::vector<Argument>& arguments);

/// Whether an operator makes one of them by a write, of which older views of its memory get their
/// history, too.
bool makes_in_place(const Graph& graph, const Operator& op, const std::vector<ValueId>& values);

/// The first operator of the range of `op`, an `smp::grad` that comes last in a graph or after all;
/// the number of operators if there is none.
int first_in_range(const Graph& graph, const Operator& op);

/// Those of a graph, by `last`.
std::vector<DifferentiatedRange> differentiated_ranges(const Graph& graph);

}  // namespace smp::graph
