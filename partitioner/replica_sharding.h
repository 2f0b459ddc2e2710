// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <string>

#include "graph/graph.h"

namespace smp::partitioner {

/// Names of parameters, or nothing where they are not known.
using ParameterNames = std::optional<std::set<std::string>>;

/// How replicas divide among them the tensors that each would have whole: docs/memory.md. With
/// both degrees 1, nothing.
struct ReplicaSharding {
  /// Whether a parameter is divided.
  bool divides(const graph::Value& parameter) const;

  /// Replicas that divide the optimizer's state and the reduced gradients
  /// (`shard_optimizer_state`).
  TORCH_ARG(int, states) = 1;
  /// Replicas that divide parameters, with their gradients and state
  /// (`sharded_data_parallel_degree`).
  TORCH_ARG(int, parameters) = 1;
  /// Elements that a parameter has at least if it is divided (`sdp_param_persistence_threshold`).
  TORCH_ARG(int64_t, smallest) = 0;
  /// The parameters that are divided, where they are known; else all that are large enough.
  TORCH_ARG(ParameterNames, names);
  /// Elements of divided parameters that are whole at one time at most, unless one unit needs
  /// more (`sdp_max_live_parameters`).
  TORCH_ARG(int64_t, live) = std::numeric_limits<int64_t>::max();
  /// Elements of gradients that are reduced together (`sdp_reduce_bucket_size`).
  TORCH_ARG(int64_t, bucket) = std::numeric_limits<int64_t>::max();
};

/// Bytes of a parameter's gradient as it is summed: in float32 if the parameter is of half
/// precision.
int64_t gradient_bytes(const graph::Value& parameter);

}  // namespace smp::partitioner
