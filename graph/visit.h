#pragma once

#include "graph/graph.h"

namespace smp::graph {

/// Calls `visit(ValueId)` for every defined tensor among an operator's arguments.
template <class Visitor>
void for_each_argument(const Operator& op, const Visitor& visit) {
  for (const Argument& argument : op.arguments) {
    for (ValueId value : argument.values) {
      if (value != kUndefined) visit(value);
    }
  }
}

/// Calls `visit(ValueId)` for every defined result of an operator.
template <class Visitor>
void for_each_result(const Operator& op, const Visitor& visit) {
  for (ValueId value : op.results) {
    if (value != kUndefined) visit(value);
  }
}

}  // namespace smp::graph
