// SPDX-License-Identifier: Apache-2.0
#include "graph/grad_shapes.h"

#include <ATen/core/stack.h>

#include <algorithm>

#include "core/node.h"
#include "graph/alias_analysis.h"
#include "graph/autograd_entry.h"
#include "graph/content.h"
#include "graph/differentiate.h"
#include "graph/leaf.h"
#include "graph/mode_scope.h"
#include "graph/random.h"
#include "graph/requires_grad.h"
#include "graph/shapes.h"
#include "graph/stack_tensors.h"
#include "graph/visit.h"
#include "graph/written_results.h"

namespace smp::graph {
namespace {

/// Runs some of a graph's operators, in their order, on tensors filled with one number.
class FilledRun {
 public:
  FilledRun(const Graph& graph, int fill)
      : graph_(graph), fill_(fill), requires_grad_(graph), environment_(graph.values.size()) {}

  void run(int index) {
    const Operator& op = graph_.operators[index];
    if (is_leaf(op.handle) || !(records_history(graph_, op) || acts_on_arguments(graph_, op))) {
      for_each_result(op, [&](ValueId id) {
        environment_[id] = filled(id);
        // A backward pass through a leaf's result is an error.
        if (requires_grad_.since(id) <= index) give_placeholder_history(environment_[id]);
      });
      return;
    }
    const std::vector<at::Tensor> results = call(op, index);
    for (size_t r = 0; r < results.size(); ++r) {
      if (op.results[r] != kUndefined) environment_[op.results[r]] = results[r];
    }
  }

  /// Calls an operator before which the graph has `index` others.
  std::vector<at::Tensor> call(const Operator& op, int index) {
    const ModeScope mode(op.mode);
    torch::jit::Stack stack;
    for (const Argument& argument : op.arguments) {
      stack.push_back(to_ivalue(argument, [&](ValueId id) { return tensor(id, index); }));
    }
    call_for_results(op.handle, stack, [&] {
      if (op.random_ordinal >= 0) {
        call_seeded(op.handle, stack, 0);
      } else {
        op.handle.callBoxed(stack);
      }
    });
    return tensors_in(stack, stack.size());
  }

  /// Tensors that stand for the arguments, in their order.
  std::vector<at::Tensor> arguments_of(const Operator& op, int index) {
    std::vector<at::Tensor> tensors;
    for (const Argument& argument : op.arguments) {
      for (ValueId id : argument.values) tensors.push_back(tensor(id, index));
    }
    return tensors;
  }

 private:
  /// A value as operator `index` finds it: with a history if it has one by then, which operators
  /// that do not run here may have given it.
  at::Tensor tensor(ValueId id, int index) {
    if (id == kUndefined) return at::Tensor();
    at::Tensor& tensor = environment_[id];
    if (!tensor.defined()) tensor = filled(id);
    if (!tensor.requires_grad() && requires_grad_.since(id) < index) {
      sinks_.push_back(core::make_node<GradientSink>());
      tensor = enter(tensor, sinks_.back());
    }
    return tensor;
  }

  at::Tensor filled(ValueId id) const {
    const Value& value = graph_.values[id];
    return value.content.defined() ? clone_content(value.content)
                                   : make_filled(value.meta, value.meta.device, fill_);
  }

  const Graph& graph_;
  const int fill_;
  const RequiresGrad requires_grad_;
  std::vector<at::Tensor> environment_;  // tensor of each value
  std::vector<GradientSinkPtr> sinks_;
};

/// The range of `op`, and before it the operators that make views of memory that is written there,
/// since a write through one is seen by the others, and views that end a history.
std::vector<int> operators_of(const Graph& graph, const Operator& op, int count) {
  const int first = first_in_range(graph, op);
  std::vector<bool> written(graph.alias_sets, false);
  for (int i = first; i < count; ++i) {
    for (int set : graph.operators[i].writes) written[set] = true;
  }
  std::vector<int> operators;
  for (int i = 0; i < count; ++i) {
    const Operator& earlier = graph.operators[i];
    const bool on_written =
        any_result(graph, earlier, [&](const Value& value) { return written[value.alias_set]; }) ||
        std::any_of(earlier.writes.begin(), earlier.writes.end(),
                    [&](int set) { return written[set]; });
    if (i >= first || on_written || ends_history(graph, earlier)) operators.push_back(i);
  }
  return operators;
}

/// How many operators of the graph come before `op`.
int count_before(const Graph& graph, const Operator& op) {
  const auto found = std::find_if(graph.operators.begin(), graph.operators.end(),
                                  [&](const Operator& other) { return &other == &op; });
  return static_cast<int>(found - graph.operators.begin());
}

std::vector<at::Tensor> grad_on_filled(const Graph& graph, const Operator& op,
                                       const std::vector<at::Tensor>& shapes, int fill) {
  const int count = count_before(graph, op);
  FilledRun run(graph, fill);
  for (int earlier : operators_of(graph, op, count)) run.run(earlier);
  const std::vector<at::Tensor> filled = run.arguments_of(op, count);
  std::vector<at::Tensor> results;
  for (const at::Tensor& result : run.call(op, count)) {
    results.push_back(to_shape(result, filled, shapes));
  }
  return results;
}

}  // namespace

std::vector<at::Tensor> grad_on_shapes(const Graph& graph, const Operator& op,
                                       const std::vector<at::Tensor>& shapes) {
  return on_zeros_or_ones(graph.device(),
                          [&](int fill) { return grad_on_filled(graph, op, shapes, fill); });
}

std::string leaf_on_the_way(const Graph& graph, const std::vector<Argument>& arguments) {
  struct Dependence {
    bool depends = false;
    std::string leaf;

    void add(const Dependence& other) {
      depends |= other.depends;
      if (leaf.empty()) leaf = other.leaf;
    }
  };
  std::vector<Dependence> of_value(graph.values.size());
  std::vector<Dependence> of_written(
      graph.alias_sets);  // on the writes to a memory, for all that read it from then on
  const auto add_all = [&](const Argument& argument, Dependence& way) {
    for (ValueId id : argument.values) {
      if (id == kUndefined) continue;
      way.add(of_value[id]);
      way.add(of_written[graph.values[id].alias_set]);
    }
  };
  const std::vector<ValueId> inputs = differentiated(graph, arguments);
  for (ValueId id : inputs) of_value[id].depends = true;
  for (const Operator& op : graph.operators) {
    if (makes_in_place(graph, op, inputs)) {
      for (int set : op.writes) of_written[set].depends = true;
    }
    if (!records_history(graph, op)) continue;
    Dependence way;
    for (const Argument& argument : op.arguments) add_all(argument, way);
    if (!way.depends) continue;
    if (is_leaf(op.handle)) way.leaf = leaf_call(op.arguments[0].constant)->module;
    for_each_result(op, [&](ValueId id) {
      if (graph.values[id].meta.requires_grad) of_value[id].add(way);
    });
    for (int set : op.writes) of_written[set].add(way);
  }
  Dependence outputs;
  add_all(arguments[0], outputs);
  return outputs.leaf;
}

}  // namespace smp::graph
