// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "graph/graph.h"
#include "graph/trace.h"

namespace smp::graph {

/// Gives data to those results of a recorded run that outlived it and follow from constants alone:
/// a table of positions or a mask that a module makes in its first `forward` and keeps. The next
/// run finds an ordinary constant there. All others stay without data, so using them is refused.
///
/// Computes the values needed for that, on the calling thread.
void give_data_to_constants(const Graph& graph, const std::vector<LiveResult>& kept);

/// Whether a recorded run has left something that it computed from data where another run may find
/// it: in a member, or a captured variable, but not only in the step's result. Whether the next run
/// reads it, which makes it a hidden state, shows when that is traced.
bool leaves_results(const TraceResult& run);

}  // namespace smp::graph
