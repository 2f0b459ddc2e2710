// SPDX-License-Identifier: Apache-2.0
#include "partitioner/gradient_flow.h"

#include <algorithm>
#include <vector>

#include "graph/operator_traits.h"
#include "graph/visit.h"
#include "partitioner/data_flow.h"

namespace smp::partitioner {

using graph::Graph;
using graph::Operator;
using graph::ValueId;
using graph::writes_to;

namespace {

bool differentiable(const graph::Value& value) {
  return at::isFloatingType(value.meta.dtype) || at::isComplexType(value.meta.dtype);
}

}  // namespace

void GradientFlow::mark(const Graph& graph, ValueId value, int operator_index) {
  if (!differentiable(graph.values[value]) || graph::is_unlinked(graph, value)) return;
  std::vector<int>& uses = uses_[value];
  if (uses.empty() || uses.back() != operator_index) uses.push_back(operator_index);
  int& earliest = earliest_reached_[requires_grad_.family(value)];
  earliest = std::min(earliest, graph.values[value].producer);
}

bool GradientFlow::reached(const Graph& graph, int operator_index) {
  const Operator& op = graph.operators[operator_index];
  return std::any_of(op.results.begin(), op.results.end(), [&](ValueId value) {
    if (value == graph::kUndefined || !graph.values[value].meta.requires_grad) return false;
    if (!uses_[value].empty()) return true;
    // A later view of written memory leads here through the view operator.
    return writes_to(graph, op, value) &&
           earliest_reached_[requires_grad_.family(value)] < operator_index;
  });
}

GradientFlow::GradientFlow(const Graph& graph)
    : requires_grad_(graph),
      uses_(graph.values.size()),
      earliest_reached_(graph.values.size(), kNever) {
  const std::vector<int> root_operator = root_operators(graph, last_writers(graph));
  for (size_t r = 0; r < graph.roots.size(); ++r) {
    mark(graph, graph.roots[r].value, std::max(root_operator[r], 0));
  }
  const auto ranges = graph::differentiated_ranges(graph);
  auto range = ranges.rbegin();
  for (int i = static_cast<int>(graph.operators.size()) - 1; i >= 0; --i) {
    const Operator& op = graph.operators[i];
    while (range != ranges.rend() && range->last > i) ++range;
    mark_same_tensors(graph, i);
    if (!records_history(graph, op) || !reached(graph, i)) continue;
    for_each_argument(op, [&](ValueId value) {
      if (requires_grad_since(value) < i) mark(graph, value, i);
    });
    if (range != ranges.rend() && range->last == i) mark_read_in(graph, *range);
  }
}

/// Marks all tensors that the operators of the range read: differentiating a second time sends
/// gradients to them.
void GradientFlow::mark_read_in(const Graph& graph, const graph::DifferentiatedRange& range) {
  for (int i = range.first; i < range.last; ++i) {
    for_each_argument(graph.operators[i], [&](ValueId value) {
      const bool made_inside = graph.values[value].producer >= range.first;
      if (!made_inside && requires_grad_since(value) < i) mark(graph, value, range.last);
    });
  }
}

void GradientFlow::mark_same_tensors(const Graph& graph, int operator_index) {
  const Operator& op = graph.operators[operator_index];
  // detach_ returns the very tensor that it is given, without its history.
  if (graph::has_trait(op.handle.schema().name(), graph::OperatorTrait::kCutsHistory)) return;
  for_each_same_tensor(op, [&](ValueId result, ValueId argument) {
    const bool has_history = requires_grad_since(argument) < operator_index;
    if (!uses_[result].empty() && has_history) mark(graph, argument, operator_index);
  });
}

}  // namespace smp::partitioner
