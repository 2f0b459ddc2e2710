#include "partitioner/gradient_flow.h"

#include <algorithm>
#include <array>
#include <string>

#include "partitioner/data_flow.h"

namespace smp::partitioner {

using graph::Graph;
using graph::Operator;
using graph::ValueId;

namespace {

/// Views that autograd does not follow.
bool cuts_gradient(const std::string& name) {
  static const std::array<const char*, 3> kNames = {"aten::detach", "aten::detach_",
                                                    "aten::variable_data"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

bool differentiable(const graph::Value& value) {
  return at::isFloatingType(value.meta.dtype) || at::isComplexType(value.meta.dtype);
}

/// True if the operator records a backward function for some result.
bool records(const Graph& graph, const Operator& op) {
  if (!op.mode.grad || op.mode.inference) return false;
  return std::any_of(op.results.begin(), op.results.end(), [&](ValueId value) {
    return value != graph::kUndefined && graph.values[value].meta.requires_grad;
  });
}

bool writes_to(const Graph& graph, const Operator& op, ValueId value) {
  return std::find(op.writes.begin(), op.writes.end(), graph.values[value].alias_set) !=
         op.writes.end();
}

}  // namespace

GradientFlow::GradientFlow(const Graph& graph)
    : parent_(graph.values.size()),
      since_(graph.values.size(), kNever),
      uses_(graph.values.size()),
      earliest_reached_(graph.values.size(), kNever) {
  find_families(graph);
  find_requires_grad(graph);
  find_dependencies(graph);
}

int GradientFlow::family(ValueId value) {
  while (parent_[value] != value) value = parent_[value] = parent_[parent_[value]];
  return value;
}

void GradientFlow::find_families(const Graph& graph) {
  for (size_t v = 0; v < parent_.size(); ++v) parent_[v] = static_cast<ValueId>(v);
  for (const Operator& op : graph.operators) {
    if (cuts_gradient(op.name())) continue;
    for_each_result(op, [&](ValueId result) {
      for_each_argument(op, [&](ValueId argument) {
        const int set = graph.values[result].alias_set;
        if (set >= 0 && set == graph.values[argument].alias_set) {
          parent_[family(result)] = family(argument);
        }
      });
    });
  }
}

void GradientFlow::find_requires_grad(const Graph& graph) {
  std::vector<std::vector<ValueId>> members(graph.values.size());
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const auto value = static_cast<ValueId>(v);
    members[family(value)].push_back(value);
    if (graph.values[v].meta.requires_grad) since_[v] = graph.values[v].producer;
  }
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const Operator& op = graph.operators[i];
    if (op.writes.empty() || !records(graph, op)) continue;
    for_each_result(op, [&](ValueId result) {
      if (!writes_to(graph, op, result) || !graph.values[result].meta.requires_grad) return;
      const int index = static_cast<int>(i);
      for (ValueId member : members[family(result)]) {
        if (graph.values[member].producer < index) since_[member] = std::min(since_[member], index);
      }
    });
  }
}

void GradientFlow::mark(const Graph& graph, ValueId value, int operator_index) {
  if (!differentiable(graph.values[value])) return;
  std::vector<int>& uses = uses_[value];
  if (uses.empty() || uses.back() != operator_index) uses.push_back(operator_index);
  int& earliest = earliest_reached_[family(value)];
  earliest = std::min(earliest, graph.values[value].producer);
}

bool GradientFlow::reached(const Graph& graph, int operator_index) {
  const Operator& op = graph.operators[operator_index];
  return std::any_of(op.results.begin(), op.results.end(), [&](ValueId value) {
    if (value == graph::kUndefined || !graph.values[value].meta.requires_grad) return false;
    if (!uses_[value].empty()) return true;
    // A later view of what is written leads here through the view operator.
    return writes_to(graph, op, value) && earliest_reached_[family(value)] < operator_index;
  });
}

void GradientFlow::find_dependencies(const Graph& graph) {
  const std::vector<int> root_operator = root_operators(graph, last_writers(graph));
  for (size_t r = 0; r < graph.roots.size(); ++r) {
    mark(graph, graph.roots[r].value, std::max(root_operator[r], 0));
  }
  for (int i = static_cast<int>(graph.operators.size()) - 1; i >= 0; --i) {
    const Operator& op = graph.operators[i];
    mark_same_tensors(graph, i);
    if (!records(graph, op) || !reached(graph, i)) continue;
    for_each_argument(op, [&](ValueId value) {
      if (since_[value] < i) mark(graph, value, i);
    });
  }
}

void GradientFlow::mark_same_tensors(const Graph& graph, int operator_index) {
  const Operator& op = graph.operators[operator_index];
  std::vector<ValueId> arguments;  // undefined ones count
  for (const graph::Argument& argument : op.arguments) {
    arguments.insert(arguments.end(), argument.values.begin(), argument.values.end());
  }
  for (size_t r = 0; r < op.results.size(); ++r) {
    const int same = op.result_is_argument[r];
    if (same < 0 || op.results[r] == graph::kUndefined || uses_[op.results[r]].empty()) continue;
    if (since_[arguments[same]] < operator_index) mark(graph, arguments[same], operator_index);
  }
}

}  // namespace smp::partitioner
