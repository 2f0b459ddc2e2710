// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/replay.h"

namespace smp::graph {

/// How the costs of a graph are measured.
struct MeasureOptions {
  /// How often the graph runs at most; the least time of each operator counts.
  TORCH_ARG(int, runs) = 1;
  /// No run begins that would end later than this many seconds after the first one did.
  TORCH_ARG(double, seconds) = 2.0;
  /// Measure, too, what operators keep for backward besides their arguments and results: masks,
  /// casts, copies.
  TORCH_ARG(bool, memory) = false;
};

/// Runs the graph operator by operator and fills in `Operator::cost` of each: time of the forward
/// call, time of the backward of that operator alone (if the graph trains), both on the clock of
/// the graph's device (graph/operator_clock.h) and rounded to two digits, and bytes of results with
/// storage of their own and of those kept for backward.
///
/// `environment` holds inputs, parameters, buffers, constants and literals. Where `checksums`
/// (of the recorded run, under the same `key`) is not empty, a result of the first run that
/// differs throws `CaptureError` with the first operator concerned: something outside of the
/// recorded operators had changed its input.
///
/// Writes to buffers as the function does; the caller restores them.
void measure_costs(Graph& graph, Environment environment, const RandomKey& key,
                   const std::vector<uint64_t>& checksums, const std::string& step_name,
                   const MeasureOptions& options = {});

/// A measurement on a busy machine is worth two digits; fewer ties, steadier plans. 0 for a value
/// that is not above 0.
double round_to_two_digits(double value);

/// The costs as one byte string, to be sent to other ranks, and back.
std::string costs_to_bytes(const Graph& graph);
void costs_from_bytes(Graph& graph, const std::string& bytes);

}  // namespace smp::graph
