// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "graph/graph.h"
#include "smp/config.h"

namespace smp::runtime {

/// Throws `UsageError` if a leaf of the graph writes a parameter that is not all there is of it:
/// one with a master weight, one that replicas divide or, by its batch, one of several `replicas`.
void check_leaf_writes(const Config& config, int replicas, const graph::Graph& graph,
                       const std::string& step_name);

}  // namespace smp::runtime
