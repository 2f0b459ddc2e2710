// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/tracer.h"

namespace smp::graph {

/// Gives data to those results of a recorded run that outlived it and follow from constants alone:
/// a table of positions or a mask that a module makes in its first `forward` and keeps. The next
/// run finds an ordinary constant there. All others stay without data, so using them is refused.
///
/// Computes what is needed for that, on the calling thread.
void give_data_to_constants(const Graph& graph, const std::vector<LiveResult>& kept);

/// Throws `CaptureError` if a run has put what it computed from data in the place of a constant
/// that it read (`state = h`), as far as that shows: nobody holds the constant (one of `released`)
/// any more, but a result of its type and shape. Each microbatch would see what was there before
/// the call, and not what the one before has left.
void check_no_state(const TraceResult& run, const std::string& step_name);

}  // namespace smp::graph
