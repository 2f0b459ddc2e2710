// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "graph/graph.h"

namespace smp::graph {

/// Per operator the autocast scope in which the program called it, counted from 0; -1 for none, or
/// for one in which casts are not kept (`ExecutionMode::autocast_cache`).
///
/// libtorch casts a parameter once in a scope: all operators inside share the result, whose
/// gradients are added in the lower precision. Where a scope ends is no operator; operators that
/// follow each other in the program under the same autocast mode are taken to be in one.
std::vector<int> autocast_scopes(const Graph& graph);

/// A parameter that several operators of one autocast scope may read as the one cast tensor.
struct SharedCast {
  ValueId parameter;
  int first;  ///< operator, in the order of the graph
  int last;
};

/// All of a graph that trains; in evaluation nothing depends on how often a parameter is cast.
std::vector<SharedCast> shared_casts(const Graph& graph);

/// Per operator the arguments that autocast may cast and that are parameters, or views of them,
/// that no operator of the graph writes; none where they are so small that it is not worth while.
/// Leaves and operators that are neither libtorch's nor ours have none: they may cast parameters
/// themselves, and write the result.
std::vector<std::vector<ValueId>> weights_to_cast(const Graph& graph);

}  // namespace smp::graph
