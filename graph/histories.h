// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "graph/graph.h"

namespace smp::graph {

/// Throws a `UsageError` where the calls of `backward` of a step function get in each other's way:
/// the pipeline runs them as one, when the whole forward has run.
///
/// Where two go over the same operator, the first has freed its saved tensors, as in libtorch. And
/// where an operator between two calls writes in place a tensor that the first needs, it writes a
/// copy (`late_writes.h`), which has no history for the second.
void check_histories(const Graph& graph, const std::string& step_name);

}  // namespace smp::graph
