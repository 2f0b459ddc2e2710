// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "graph/graph.h"
#include "smp/config.h"

namespace smp::runtime {

/// Throws `UsageError` if a leaf of the graph writes a parameter that is not all there is of it:
/// one with a master weight, or one that replicas divide.
void check_leaf_writes(const Config& config, const graph::Graph& graph,
                       const std::string& step_name);

}  // namespace smp::runtime
