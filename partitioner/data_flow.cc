// SPDX-License-Identifier: Apache-2.0
#include "partitioner/data_flow.h"

#include <fmt/format.h>

#include <algorithm>

#include "graph/alias_analysis.h"
#include "graph/requires_grad.h"

namespace smp::partitioner {

using graph::Graph;
using graph::Value;
using graph::ValueId;
using graph::ValueKind;

bool has_owner(const Value& value) {
  return value.kind == ValueKind::kParameter || value.kind == ValueKind::kBuffer;
}

std::vector<int> last_writers(const Graph& graph) {
  const graph::AliasAnalysis aliases(graph);
  std::vector<int> result;
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const int written = aliases.of(static_cast<ValueId>(v)).last_writer();
    result.push_back(std::max(graph.values[v].producer, written));
  }
  return result;
}

namespace {

/// Per value: the last operator that may send a gradient back to it, -1 if there is none.
std::vector<int> last_differentiable_uses(const Graph& graph) {
  std::vector<int> result(graph.values.size(), -1);
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const graph::Operator& op = graph.operators[i];
    if (!graph::result_requires_grad(graph, op)) continue;
    for_each_argument(op, [&](ValueId value) { result[value] = static_cast<int>(i); });
  }
  return result;
}

}  // namespace

std::vector<int> root_operators(const Graph& graph, const std::vector<int>& last_writers) {
  const std::vector<int> last_uses = last_differentiable_uses(graph);
  std::vector<int> result;
  for (const graph::BackwardRoot& root : graph.roots) {
    int index = std::max(last_writers[root.value], last_uses[root.value]);
    if (root.gradient != graph::kUndefined) index = std::max(index, last_writers[root.gradient]);
    result.push_back(index);
  }
  return result;
}

std::vector<std::vector<int>> value_uses(const Graph& graph) {
  std::vector<std::vector<int>> uses(graph.values.size());
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    for_each_argument(graph.operators[i],
                      [&](ValueId value) { uses[value].push_back(static_cast<int>(i)); });
  }
  const std::vector<int> root_operator = root_operators(graph, last_writers(graph));
  for (size_t r = 0; r < graph.roots.size() && !graph.operators.empty(); ++r) {
    const int index = std::max(root_operator[r], 0);  // a parameter is complete from the start
    uses[graph.roots[r].value].push_back(index);
    const ValueId gradient = graph.roots[r].gradient;
    if (gradient != graph::kUndefined) uses[gradient].push_back(index);
  }
  for (std::vector<int>& of_value : uses) {
    std::sort(of_value.begin(), of_value.end());
    of_value.erase(std::unique(of_value.begin(), of_value.end()), of_value.end());
  }
  return uses;
}

std::string describe_value(const Graph& graph, ValueId id) {
  const Value& value = graph.values[id];
  if (value.kind == ValueKind::kResult || value.name.empty()) return fmt::format("%{}", id);
  return fmt::format("{} \"{}\"", graph::to_string(value.kind), value.name);
}

std::string describe_operator(const Graph& graph, int index) {
  return fmt::format("operator {} ({})", index, graph.operators[index].name());
}

}  // namespace smp::partitioner
