// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "graph/coalesce.h"
#include "graph/graph.h"
#include "graph/random.h"
#include "graph/trace.h"
#include "runtime/parameters/dividing.h"
#include "runtime/runtime.h"

namespace smp::runtime {

/// A captured step that may run several of its microbatches as one. Internal.
struct CoalescingRequest {
  std::string step_name;
  const graph::Graph& graph;    ///< graph of one microbatch, with costs
  int64_t microbatches = 1;     ///< in one batch
  bool measured = false;        ///< the graph's times are measured, in this call
  bool per_microbatch = false;  ///< the function runs for each of them
  graph::RandomKey key;
  /// The inputs of the first of so many microbatches.
  std::function<std::vector<at::Tensor>(int64_t microbatches)> inputs;
  /// Captures the step on inputs of other sizes; the user's state does not change.
  std::function<graph::TraceResult(const std::vector<at::Tensor>&)> capture;
};

/// The graph that a step runs. Internal.
struct CoalescingChoice {
  std::shared_ptr<const graph::Coalesced> coalesced;  ///< null: microbatches run one by one
  /// Its division, where the choice was made by that; else null.
  std::shared_ptr<Division> division;
};

/// Chooses, with `"numerics": "fast"`, how many microbatches of the step run as one, and the graph
/// that does it, with costs. It takes the number that is predicted to be fastest, by costs measured
/// for each candidate number, and later graphs follow the first. Says its decision and the reason
/// in the log. The same on all ranks of a pipeline and its tensor-parallel groups, and on all
/// replicas that run as many microbatches of the graph; collective over those ranks, and over the
/// world if the times are measured.
CoalescingChoice choose_coalescing(Runtime& runtime, const CoalescingRequest& request);

}  // namespace smp::runtime
