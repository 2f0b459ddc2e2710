// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "graph/graph.h"
#include "graph/graph_map.h"

namespace smp::runtime {

/// The hash of the contents of all defined tensors.
uint64_t hash_inputs(const std::vector<at::Tensor>& tensors);

/// Fingerprints of a graph as it was captured. Hashing a graph prints it, which is too slow for
/// every step.
struct StepFingerprints {
  explicit StepFingerprints(const graph::Graph& graph);

  uint64_t graph;
  uint64_t constants;
};

/// The step that a rank is about to run. Internal.
struct StepTrace {
  const std::string& name;  ///< name of the step function
  const graph::Graph& graph;
  const StepFingerprints& fingerprints;
  const std::vector<std::vector<graph::ConstantOverride>>& constants;  ///< one a microbatch, or one
  const std::vector<std::vector<graph::ContentOverride>>& contents;
  const std::vector<at::Tensor>& inputs;  ///< inputs of the whole batch
  const std::string& note;                ///< a note that the other ranks must know beside
  int64_t microbatches;                   ///< into how many the batch is cut
};

/// The name in errors of the ranks that must agree ("pp rank"), and the setting by which data are
/// divided among them.
struct AgreeingRanks {
  const char* name;
  const char* share;
};

/// Throws a `UsageError` on all ranks of the group, those of a pipeline and of its tensor-parallel
/// groups, unless they run the same graph with the same constants on the same inputs; it shows the
/// first difference. Returns the notes of all. Collective over `group`.
std::vector<std::string> check_agreement(comm::Communicator& group, const StepTrace& step,
                                         const AgreeingRanks& ranks);

/// Throws a `UsageError` on all replicas unless they run the same graph as many times; it shows the
/// first difference. For replicas that gather parameters together. Collective over `replicas`.
void check_same_operators(comm::Communicator& replicas, const StepTrace& step);

}  // namespace smp::runtime
