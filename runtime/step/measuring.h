// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/random.h"
#include "runtime/runtime.h"

namespace smp::runtime {

/// Throws a `UsageError` on all ranks unless all have captured the same graph in their first step
/// and all replicas cut their batches into as many microbatches: they share one plan. Collective
/// over the world; ranks of one pipeline have agreed on both.
void check_same_first_step(const Job& job, const graph::Graph& graph, int64_t microbatches,
                           const std::string& step_name);

/// Measures the graph's costs on world rank 0, or estimates them if the configuration says so or
/// the graph needs a tensor-parallel group to run, and sends them to all ranks. Returns whether
/// times are measured. Collective over the world; all ranks have captured the same graph.
/// `checksums` are of the recorded run.
bool measure_costs_once(Runtime& runtime, graph::Graph& graph,
                        const std::vector<at::Tensor>& inputs, const graph::RandomKey& key,
                        const std::vector<uint64_t>& checksums, const std::string& step_name);

/// Writes the first graph, with its costs, to the configuration's `graph_file`, if that is set; on
/// world rank 0. Throws `ConfigError` if it cannot be written.
void save_first_graph(const Runtime& runtime, const graph::Graph& graph);

}  // namespace smp::runtime
