#pragma once

#include <vector>

#include "graph/graph.h"
#include "graph/tracer.h"

namespace smp::graph {

/// Gives data to those results of a recorded run that outlived it and follow from constants alone:
/// a table of positions or a mask that a module makes in its first `forward` and keeps. The next
/// run finds an ordinary constant there. All others stay without data, so using them is refused.
///
/// Computes what is needed for that, on the calling thread.
void give_data_to_constants(const Graph& graph, const std::vector<KeptResult>& kept);

}  // namespace smp::graph
