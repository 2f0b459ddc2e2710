// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/visit.h"

namespace smp::partitioner {

using graph::for_each_argument;
using graph::for_each_result;

/// Whether a value is a parameter or a buffer, which one rank owns.
bool has_owner(const graph::Value& value);

/// Per value: the last operator that makes it or writes its storage, -1 if there is none. From
/// there on an output or a backward root of the graph sees the value.
std::vector<int> last_writers(const graph::Graph& graph);

/// Per value: the operators that use it, ascending, each once. A backward root and its gradient
/// are used where the root's backward starts (`root_operators`).
std::vector<std::vector<int>> value_uses(const graph::Graph& graph);

/// For each backward root the operator after which its backward starts: both it and its gradient
/// are complete, and no later operator sends it a gradient, since a root's own comes first into
/// the sum. -1: at once.
std::vector<int> root_operators(const graph::Graph& graph, const std::vector<int>& last_writers);

/// How texts call a value: `parameter "fc.weight"`, or "%12" for a result.
std::string describe_value(const graph::Graph& graph, graph::ValueId value);

/// How texts call an operator: "operator 12 (aten::addmm)".
std::string describe_operator(const graph::Graph& graph, int index);

}  // namespace smp::partitioner
