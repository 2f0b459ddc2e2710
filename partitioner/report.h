#pragma once

#include <cstdint>
#include <string>

#include "graph/graph.h"
#include "partitioner/plan.h"

namespace smp::partitioner {

/// A table of the plan for people: per stage the modules, operators, parameters, memory, share of
/// time and what it sends; then the balance and what several stages share. The first line starts
/// with "Partition assignments:". Ends with a newline.
std::string report(const graph::Graph& graph, const Plan& plan, int microbatches);

/// "1.5 KiB": at most four characters and the unit.
std::string format_bytes(int64_t bytes);

/// "12.3 M": at most four characters and the unit.
std::string format_count(int64_t count);

}  // namespace smp::partitioner
