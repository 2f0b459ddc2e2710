// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "graph/graph.h"
#include "partitioner/plan.h"

namespace smp::partitioner {

/// The module of a dotted path and those around it, the outermost first: "a.b.c" -> "a", "a.b",
/// "a.b.c". None for an empty path.
std::vector<std::string> enclosing_modules(const std::string& path);

/// Per stage its modules, in program order, in as few words as possible: "embed, blocks.0-3". A
/// module stands for all inside it when no other stage has a part of it. The own operators of a
/// divided module are listed as "blocks.3 (part)" where no child of it is. Operators outside any
/// module: "(step function)".
std::vector<std::string> stage_modules(const graph::Graph& graph, const Plan& plan);

}  // namespace smp::partitioner
