// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "graph/graph.h"

namespace smp::graph {

/// The results of `op`, an `smp::grad` of `graph` or one that follows all of its operators, as meta
/// tensors; `shapes` stand for its arguments.
///
/// Which gradients there are, and how they lie in memory, only a backward pass tells. So those
/// operators that `op` differentiates run here on zeros, or on ones where they take no zeros.
std::vector<at::Tensor> grad_on_shapes(const Graph& graph, const Operator& op,
                                       const std::vector<at::Tensor>& shapes);

/// The leaf module on the path from the inputs of an `smp::grad` with these arguments, after all
/// operators of `graph`, to its outputs; empty if there is none.
std::string leaf_on_the_way(const Graph& graph, const std::vector<Argument>& arguments);

}  // namespace smp::graph
