#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/replay.h"

namespace smp::graph {

/// Runs the graph operator by operator and fills in `Operator::cost` of each: time of the forward
/// call, time of the backward of that operator alone (if the graph trains), rounded to two
/// digits, and bytes of results and of what is kept for backward, estimated as the bytes of
/// results with storage of their own that require a gradient.
///
/// `environment` holds inputs, parameters, buffers, constants and literals. Where `checksums`
/// (of the recorded run, under the same `key`) is not empty, a result that differs throws
/// `CaptureError` with the first operator concerned: something outside of the recorded operators
/// had changed its input.
///
/// Writes to buffers as the function does; the caller restores them.
void measure_costs(Graph& graph, Environment environment, const RandomKey& key,
                   const std::vector<uint64_t>& checksums, const std::string& step_name);

/// The costs as one byte string, to be sent to other ranks, and back.
std::string costs_to_bytes(const Graph& graph);
void costs_from_bytes(Graph& graph, const std::string& bytes);

}  // namespace smp::graph
