// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "graph/graph.h"
#include "partitioner/cost_model.h"

namespace smp::partitioner {

/// Time of one operator for one microbatch: forward, and backward if the graph trains; in us.
double operator_time_us(const graph::Graph& graph, const graph::Operator& op);

/// Per operator the bytes of the parameters that it is the first to read. A parameter that is
/// read through a view counts where the view is made.
std::vector<int64_t> parameter_bytes(const graph::Graph& graph);

/// Cost of each operator: its share of the whole graph's memory (bytes of the parameters it is
/// the first to read, and of the activations it saves) and its share of the time,
///
///     cost = memory_weight * memory / total memory + (1 - memory_weight) * time / total time.
///
/// Shares carry no unit, so the weight means the same for every model. A total of zero leaves its
/// term out; with neither memory nor time all operators cost the same. Throws `ConfigError` if
/// `memory_weight` is outside [0, 1].
std::vector<double> operator_costs(const graph::Graph& graph, double memory_weight);

/// Sets the times of a graph's operators as `estimate_costs` estimates them, and leaves the bytes
/// as they are.
void estimate_times(graph::Graph& graph, const Compute& compute = {});

/// Sets the costs of a graph that was captured on shapes alone. An operator takes the times and
/// saved bytes of the one in `measured` (may be null) that has the same scope, the same name and
/// the same occurrence among those, scaled by the ratio of their results' bytes. Another
/// operator costs a call and, by `compute`, the larger of two times: moving its arguments and
/// results, or its floating point operations (`graph::operator_flops`). Its backward, if there is
/// one, costs twice that; it is taken to save its own results. Views move nothing.
void estimate_costs(graph::Graph& graph, const graph::Graph* measured, const Compute& compute = {});

}  // namespace smp::partitioner
