// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/measuring.h"

#include <algorithm>
#include <sstream>

#include "core/check.h"
#include "graph/content.h"
#include "graph/profile.h"
#include "graph/replay.h"
#include "graph/serialize.h"
#include "partitioner/cost.h"
#include "runtime/first_difference.h"
#include "runtime/parameters/buffer_restorer.h"
#include "runtime/step/microbatches.h"

namespace smp::runtime {
namespace {

using graph::ValueKind;

/// Whether the graph cannot run on one rank alone, since ranks of a tensor-parallel group have
/// divided its parameters or exchange values in it.
bool runs_in_group(const Runtime& runtime, const graph::Graph& graph) {
  const auto is_part = [&](const graph::Value& value) {
    return value.kind == ValueKind::kParameter && runtime.table().at(value.name).is_divided();
  };
  const auto exchanges = [](const graph::Operator& op) {
    return op.name().rfind("smp::tp_", 0) == 0;
  };
  return runtime.is_tensor_parallel() &&
         (std::any_of(graph.values.begin(), graph.values.end(), is_part) ||
          std::any_of(graph.operators.begin(), graph.operators.end(), exchanges));
}

/// A measurement on a busy machine is best repeated.
constexpr int kMeasuredRuns = 3;

graph::Environment whole_environment(const Runtime& runtime, const graph::Graph& graph,
                                     const std::vector<at::Tensor>& inputs) {
  graph::Environment environment(graph.values.size());
  for (size_t id = 0; id < graph.values.size(); ++id) {
    const graph::Value& value = graph.values[id];
    if (value.kind == ValueKind::kInput) {
      environment[id] = graph::copy_to(runtime.device(), inputs[std::stoul(value.name)]);
    }
    if (value.kind == ValueKind::kParameter || value.kind == ValueKind::kBuffer) {
      environment[id] = runtime.table().at(value.name).tensor;
    }
    if (value.content.defined()) environment[id] = graph::clone_content(value.content);
  }
  return environment;
}

}  // namespace

void check_same_first_step(const Job& job, const graph::Graph& graph, int64_t microbatches,
                           const std::string& step_name) {
  const core::Topology& topology = job.topology();
  const auto all =
      comm::all_gather_bytes(*job.world(), c10::str(microbatches, " ", graph.fingerprint()));
  std::vector<int64_t> counts(topology.rdp_size());
  std::vector<std::string> graphs(all.size());
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const int replica = topology.rank_in(CommGroup::kRdp, static_cast<int>(rank));
    std::istringstream(all[rank]) >> counts[replica] >> graphs[rank];
  }
  check_same_microbatches(counts, step_name, "Replicas share one plan, which the first step makes");
  const size_t other = first_other(graphs);
  SMP_CHECK_WITH(UsageError, other == 0, "step function \"", step_name,
                 "\" calls other operators on rank ", other,
                 " than on rank 0 in its first step. "
                 "All replicas must begin with the same step function on inputs of the same shape");
}

bool measure_costs_once(Runtime& runtime, graph::Graph& graph,
                        const std::vector<at::Tensor>& inputs, const graph::RandomKey& key,
                        const std::vector<uint64_t>& checksums, const std::string& step_name) {
  const Config& config = runtime.config();
  const bool runs = !config.skip_tracing() && !runs_in_group(runtime, graph);
  const bool times = runs && config.trace_execution_times();
  const partitioner::Compute& compute = runtime.first_step.costs.compute;
  if (!runs) {
    partitioner::estimate_costs(graph, nullptr, compute);
  } else if (runtime.rank() == 0) {
    const BufferRestorer restorer(runtime.table());
    graph::measure_costs(graph, whole_environment(runtime, graph, inputs), key, checksums,
                         step_name,
                         graph::MeasureOptions()
                             .runs(times ? kMeasuredRuns : 1)
                             .memory(config.trace_memory_usage()));
    if (!times) partitioner::estimate_times(graph, compute);
  }
  const std::string bytes =
      comm::broadcast_bytes(*runtime.world(), graph::costs_to_bytes(graph), 0);
  graph::costs_from_bytes(graph, bytes);
  return times;
}

void save_first_graph(const Runtime& runtime, const graph::Graph& graph) {
  const auto path = runtime.config().graph_file();
  if (path && runtime.rank() == 0) {
    graph::save_graph(graph, *path, runtime.first_step.state_factors);
  }
}

}  // namespace smp::runtime
