// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/ones.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "graph/graph.h"

namespace smp::partitioner::testing {

/// A tensor of the graph being built.
struct Ref {
  graph::ValueId id = graph::kUndefined;
};

/// An argument of an operator: a tensor, several, or a constant.
struct Arg {
  graph::Argument argument;

  Arg(Ref ref) {  // NOLINT: converts
    argument.kind = graph::Argument::Kind::kTensor;
    argument.values = {ref.id};
  }
  Arg(const std::vector<Ref>& refs) {  // NOLINT: converts
    argument.kind = graph::Argument::Kind::kTensorList;
    for (Ref ref : refs) argument.values.push_back(ref.id);
  }
  Arg(c10::IValue constant) {  // NOLINT: converts
    argument.constant = std::move(constant);
  }
  Arg(int number) : Arg(c10::IValue(number)) {}     // NOLINT: converts
  Arg(double number) : Arg(c10::IValue(number)) {}  // NOLINT: converts
  Arg(bool flag) : Arg(c10::IValue(flag)) {}        // NOLINT: converts
};

/// The stack for one operator, given the tensor of each value.
inline torch::jit::Stack make_stack(const std::vector<graph::Argument>& arguments,
                                    const std::vector<at::Tensor>& tensors) {
  torch::jit::Stack stack;
  for (const graph::Argument& argument : arguments) {
    if (argument.kind == graph::Argument::Kind::kConstant) {
      stack.push_back(argument.constant);
    } else if (argument.kind == graph::Argument::Kind::kTensor) {
      stack.emplace_back(tensors[argument.values[0]]);
    } else {
      c10::List<at::Tensor> list;
      for (graph::ValueId value : argument.values) list.push_back(tensors[value]);
      stack.emplace_back(std::move(list));
    }
  }
  return stack;
}

/// Builds a graph by hand: each operator really runs, on small tensors, so that shapes, aliases,
/// writes and requires_grad are libtorch's own.
class GraphBuilder {
 public:
  Ref input(const at::Tensor& tensor) {
    const std::string name = std::to_string(graph_.inputs.size());
    const Ref ref = add_value(graph::ValueKind::kInput, name, tensor);
    graph_.inputs.push_back(ref.id);
    return ref;
  }
  Ref parameter(const std::string& name, at::Tensor tensor) {
    return add_value(graph::ValueKind::kParameter, name, tensor.requires_grad_());
  }
  Ref frozen(const std::string& name, const at::Tensor& tensor) {
    return add_value(graph::ValueKind::kParameter, name, tensor);
  }
  Ref buffer(const std::string& name, const at::Tensor& tensor) {
    return add_value(graph::ValueKind::kBuffer, name, tensor);
  }
  Ref constant(const at::Tensor& tensor) {
    const Ref ref = add_value(graph::ValueKind::kConstant, "", tensor);
    graph_.values[ref.id].content = tensor.clone();
    return ref;
  }

  /// Runs "aten::add.Tensor" or the like and records it; the first result. Throws its errors.
  Ref op(const std::string& name, const std::vector<Arg>& args) {
    const size_t dot = name.find('.');
    graph::Operator op(c10::Dispatcher::singleton().findSchemaOrThrow(
        name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.substr(dot + 1).c_str()));
    for (const Arg& arg : args) op.arguments.push_back(arg.argument);
    torch::jit::Stack stack = make_stack(op.arguments, tensors_);
    const at::AutoGradMode mode(grad_mode);
    op.handle.callBoxed(stack);
    op.first_result = static_cast<graph::ValueId>(graph_.values.size());
    op.mode.grad = grad_mode;
    op.scope = scope;
    const int index = static_cast<int>(graph_.operators.size());
    note_writes(op);
    std::vector<at::Tensor> results;
    for (const c10::IValue& value : stack) {
      if (value.isTensor()) {
        results.push_back(value.toTensor());
      } else {
        for (const at::Tensor& tensor : value.toTensorVector()) results.push_back(tensor);
      }
    }
    for (const at::Tensor& tensor : results) {
      op.result_is_argument.push_back(index_of_argument(op, tensor));
      const Ref ref = add_value(graph::ValueKind::kResult, "", tensor);
      graph_.values[ref.id].producer = index;
      op.results.push_back(ref.id);
    }
    graph_.operators.push_back(std::move(op));
    return Ref{graph_.operators.back().results[0]};
  }

  /// The operators that `nn::Linear` on two dimensions makes.
  Ref linear(const std::string& name, Ref x, Ref weight, Ref bias) {
    scope = name;
    const Ref transposed = op("aten::t", {weight});
    return op("aten::addmm", {bias, x, transposed, 1, 1});
  }

  /// Costs of the last operator.
  void cost(double forward_us, double backward_us = 0, int64_t saved_bytes = 0) {
    graph::Cost& cost = graph_.operators.back().cost;
    cost.forward_us = forward_us;
    cost.backward_us = backward_us;
    cost.saved_bytes = saved_bytes;
  }

  void output(Ref ref) { graph_.outputs.push_back(ref.id); }
  void backward(Ref ref, Ref gradient = Ref()) {
    graph_.roots.push_back({ref.id, gradient.id, {}});
  }

  graph::Graph& graph() { return graph_; }
  const at::Tensor& tensor(Ref ref) const { return tensors_[ref.id]; }

  std::string scope;
  bool grad_mode = true;

 private:
  Ref add_value(graph::ValueKind kind, const std::string& name, const at::Tensor& tensor) {
    graph::Value value;
    value.kind = kind;
    value.name = name;
    value.meta = graph::TensorMeta::of(tensor);
    const auto [set, made] =
        alias_sets_.try_emplace(tensor.storage().unsafeGetStorageImpl(), graph_.alias_sets);
    if (made) ++graph_.alias_sets;
    value.alias_set = set->second;
    graph_.values.push_back(std::move(value));
    tensors_.push_back(tensor);
    return Ref{static_cast<graph::ValueId>(graph_.values.size() - 1)};
  }

  void note_writes(graph::Operator& op) const {
    const auto& schema = op.handle.schema();
    for (size_t i = 0; i < op.arguments.size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias == nullptr || !alias->isWrite()) continue;
      for (graph::ValueId value : op.arguments[i].values) {
        op.writes.push_back(graph_.values[value].alias_set);
      }
    }
  }

  int index_of_argument(const graph::Operator& op, const at::Tensor& tensor) const {
    int index = 0;
    for (const graph::Argument& argument : op.arguments) {
      for (graph::ValueId value : argument.values) {
        if (tensors_[value].is_same(tensor)) return index;
        ++index;
      }
    }
    return -1;
  }

  graph::Graph graph_;
  std::vector<at::Tensor> tensors_;  ///< keeps storages alive, so that their addresses differ
  std::map<const c10::StorageImpl*, int> alias_sets_;
};

/// y = relu(x), a row of y, and relu_ of the row: y is used afterwards, so that the last cut is
/// illegal.
inline GraphBuilder written_by_a_view() {
  GraphBuilder b;
  b.grad_mode = false;
  const Ref y = b.op("aten::relu", {b.input(at::ones({2, 2}))});
  const Ref row = b.op("aten::select.int", {y, 0, 0});
  b.op("aten::relu_", {row});
  b.output(y);
  return b;
}

}  // namespace smp::partitioner::testing
