#pragma once

#include <string>
#include <vector>

#include "graph/graph.h"

namespace smp::partitioner {

/// Calls `visit(ValueId)` for every defined tensor among an operator's arguments.
template <class Visitor>
void for_each_argument(const graph::Operator& op, const Visitor& visit) {
  for (const graph::Argument& argument : op.arguments) {
    for (graph::ValueId value : argument.values) {
      if (value != graph::kUndefined) visit(value);
    }
  }
}

/// Calls `visit(ValueId)` for every defined result of an operator.
template <class Visitor>
void for_each_result(const graph::Operator& op, const Visitor& visit) {
  for (graph::ValueId value : op.results) {
    if (value != graph::kUndefined) visit(value);
  }
}

/// Per value: the last operator that makes it or writes its storage, -1 if there is none. From
/// there on the value is what an output or a backward root of the graph sees.
std::vector<int> last_writers(const graph::Graph& graph);

/// Per value: the operators that use it, ascending, each once. A backward root and its gradient
/// are used where both are complete.
std::vector<std::vector<int>> value_uses(const graph::Graph& graph);

/// For each backward root the operator after which its backward may start; -1: at once.
std::vector<int> root_operators(const graph::Graph& graph, const std::vector<int>& last_writers);

/// How texts call a value: `parameter "fc.weight"`, or "%12" for a result.
std::string describe_value(const graph::Graph& graph, graph::ValueId value);

/// How texts call an operator: "operator 12 (aten::addmm)".
std::string describe_operator(const graph::Graph& graph, int index);

}  // namespace smp::partitioner
