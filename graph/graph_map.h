// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "graph/graph.h"

namespace smp::graph {

/// A constant of a run that differs from the recorded one, where the graph allows it.
struct ConstantOverride {
  int operator_index;
  int argument;
  c10::IValue value;
};

/// The counterpart of `ConstantOverride` for the content of a literal or constant tensor.
struct ContentOverride {
  ValueId value;
  at::Tensor content;
};

/// The way from a graph to another: the operators, values, numbers and microbatches that stand in
/// the new one for those of the original. A pass gives a graph and a map; maps of passes one after
/// the other compose.
struct GraphMap {
  /// Where a number of the original is now.
  struct Number {
    int operator_index;  ///< -1: nowhere, it must stay as it was
    int argument;
    std::function<c10::IValue(const c10::IValue&)> change;  ///< null: as it is
    std::string name;  ///< the original operator's, where the number must stay as it was
  };

  int factor = 1;  ///< microbatches of the original that run as one
  /// Those that stand for each operator and each value of the original.
  std::vector<std::vector<int>> operators;
  std::vector<std::vector<ValueId>> values;
  /// Places by operator and argument of the original. A number that is not here is the same
  /// argument of each operator that stands for the original's.
  std::map<std::pair<int, int>, std::vector<Number>> numbers;

  /// The same graph; or the operator at `order[i]` comes to i, unless that is empty.
  static GraphMap in_order(const Graph& graph, const std::vector<int>& order = {});

  /// The places of a number of the original.
  std::vector<Number> places_of(int operator_index, int argument) const;
  /// Overrides of the original's constants, as overrides of the new graph's. Throws `UsageError`
  /// for a number that must stay as it was.
  std::vector<ConstantOverride> constants(const std::vector<ConstantOverride>& changes) const;
  std::vector<ContentOverride> contents(const std::vector<ContentOverride>& changes) const;
  /// Outputs of the new graph, by position and microbatch, as those of the original.
  std::vector<std::vector<at::Tensor>> outputs(std::vector<std::vector<at::Tensor>> made) const;
};

/// The map of two passes, the second on the result of the first. One of them at the most may
/// coalesce microbatches.
GraphMap compose(const GraphMap& first, const GraphMap& second);

/// The mode of an operator that a pass puts between a value and the operator that reads it (null:
/// the end of the graph): that of the reader, since it belongs to it, but with a history even if
/// this reader needs none.
ExecutionMode mode_before(const Graph& graph, ValueId value, const Operator* reader);

}  // namespace smp::graph
