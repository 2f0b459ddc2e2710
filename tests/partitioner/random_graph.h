// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/ones.h>

#include <algorithm>
#include <random>
#include <vector>

#include "partitioner/plan.h"
#include "tests/partitioner/graph_builder.h"

namespace smp::partitioner::testing {

/// A random program on tensors of small whole numbers, so that results are exact: in-place
/// operators, views of views, several outputs. It runs under no_grad, or trains: then parameters
/// require grad, some operators run under no_grad, and there is a root if anything requires grad
/// and libtorch can go backward through the program.
class RandomProgram {
 public:
  explicit RandomProgram(unsigned seed, bool train = false) : random_(seed), train_(train) {
    builder_.grad_mode = train;
    const int based = 1 + pick(3);
    add(builder_.input(numbers()));
    for (int i = 0; i < based; ++i) add_based(i);
    const int operators = 3 + pick(8);
    while (static_cast<int>(builder_.graph().operators.size()) < operators) {
      add_operator();
    }
    for (size_t i = 0; i < live_.size(); ++i) {
      if (i + 1 == live_.size() || pick(4) == 0) builder_.output(live_[i]);
    }
    if (train) add_root();
  }

  graph::Graph& graph() { return builder_.graph(); }
  const at::Tensor& tensor(graph::ValueId id) const { return builder_.tensor(Ref{id}); }
  /// The content of inputs, parameters, buffers and constants before the program ran.
  const std::vector<at::Tensor>& initial() const { return initial_; }

 private:
  int pick(int count) { return static_cast<int>(random_() % count); }

  at::Tensor numbers() {
    at::Tensor tensor = at::ones({4, 4});
    for (int i = 0; i < 16; ++i) tensor.data_ptr<float>()[i] = static_cast<float>(pick(5) - 2);
    return tensor;
  }

  void add(Ref ref) {
    const at::Tensor& tensor = builder_.tensor(ref);
    live_.push_back(ref);
    initial_.push_back(tensor.detach().clone().set_requires_grad(tensor.requires_grad()));
  }

  void add_based(int index) {
    const std::string name = "t" + std::to_string(index);
    switch (pick(3)) {
      case 0:
        return add(train_ ? builder_.parameter(name, numbers()) : builder_.frozen(name, numbers()));
      case 1:
        return add(builder_.buffer(name, numbers()));
      default:
        return add(builder_.constant(numbers()));
    }
  }

  /// An operator on some tensors that live; one that libtorch refuses is not recorded.
  void add_operator() {
    const size_t a = pick(static_cast<int>(live_.size()));
    const size_t b = pick(static_cast<int>(live_.size()));
    const int kind = pick(9);
    // Autograd refuses to use some views that were made under no_grad, even to send them.
    if (train_) builder_.grad_mode = kind > 5 || pick(4) != 0;
    try {
      switch (kind) {
        case 0:
          return live_.push_back(builder_.op("aten::relu", {live_[a]}));
        case 1:
          return in_place(a, builder_.op("aten::relu_", {live_[a]}));
        case 2:
          return live_.push_back(builder_.op("aten::add.Tensor", {live_[a], live_[b], 1}));
        case 3:
          return in_place(a, builder_.op("aten::mul_.Tensor", {live_[a], live_[b]}));
        case 4:
          return in_place(a, builder_.op("aten::add_.Tensor", {live_[a], live_[b], 1}));
        case 5:
          return live_.push_back(builder_.op("aten::matmul", {live_[a], live_[b]}));
        case 6:
          return live_.push_back(builder_.op("aten::t", {live_[a]}));
        case 7:
          return live_.push_back(builder_.op("aten::select.int", {live_[a], 0, pick(2)}));
        default:
          return live_.push_back(builder_.op("aten::slice.Tensor", {live_[a], 0, 0, 2, 1}));
      }
    } catch (const c10::Error&) {
      return;  // shapes that do not fit, or a leaf written in place
    }
  }

  /// Writes in place as C++ does: the tensor object goes on under the id of the operator's result.
  void in_place(size_t a, Ref result) { live_[a] = result; }

  /// The sum of the last tensor that requires grad.
  void add_root() {
    for (size_t i = live_.size(); i-- > 0;) {
      if (!builder_.tensor(live_[i]).requires_grad()) continue;
      builder_.grad_mode = true;
      const Ref loss = builder_.op("aten::sum", {live_[i], c10::IValue()});
      try {
        builder_.tensor(loss).backward();
      } catch (const c10::Error&) {
        return;  // something that backward needs was written in place
      }
      return builder_.backward(loss);
    }
  }

  std::mt19937 random_;
  bool train_;
  GraphBuilder builder_;
  std::vector<Ref> live_;  ///< per tensor object, its newest id
  std::vector<at::Tensor> initial_;
};

/// Runs a plan on one machine as ranks would: every stage has its own copies of inputs,
/// parameters, buffers and constants, and a value crosses as a copy of its own, which autograd
/// does not link to the sender's.
class StagedRun {
 public:
  StagedRun(const graph::Graph& graph, const Plan& plan, const std::vector<at::Tensor>& initial)
      : graph_(graph), plan_(plan), tensors_(plan.stages()), entries_(plan.stages()) {
    for (int stage = 0; stage < plan.stages(); ++stage) {
      tensors_[stage].resize(graph.values.size());
      entries_[stage].resize(graph.values.size());
      for (size_t v = 0; v < initial.size(); ++v) tensors_[stage][v] = copy(initial[v]);
    }
    for (int stage = 0; stage < plan.stages(); ++stage) {
      for (size_t i = 0; i < graph.operators.size(); ++i) {
        if (runs(stage, static_cast<int>(i))) run(graph.operators[i], tensors_[stage]);
      }
      for (const Transfer& transfer : plan.transfers) {
        if (transfer.from == stage) send(transfer);
      }
    }
  }

  at::Tensor tensor(int stage, graph::ValueId value) const { return tensors_[stage][value]; }

  /// The leaf as which a value entered a stage.
  at::Tensor entry(int stage, graph::ValueId value) const { return entries_[stage][value]; }

  at::Tensor output(size_t index) const {
    return tensors_[plan_.stage_of_output[index]][graph_.outputs[index]];
  }

 private:
  bool runs(int stage, int index) const {
    const auto& again = plan_.recomputed;
    return plan_.stage_of_operator[index] == stage ||
           std::find(again.begin(), again.end(), Recomputed{index, stage}) != again.end();
  }

  static at::Tensor copy(const at::Tensor& tensor) {
    const at::AutoGradMode no_grad(false);  // autograd refuses to look at some views
    return tensor.detach().clone().set_requires_grad(tensor.requires_grad());
  }

  void send(const Transfer& transfer) {
    at::Tensor& leaf = entries_[transfer.to][transfer.value];
    leaf = copy(tensors_[transfer.from][transfer.value]);
    const at::AutoGradMode mode(true);
    tensors_[transfer.to][transfer.value] = leaf.clone();  // in-place operators refuse leaves
  }

  static void run(const graph::Operator& op, std::vector<at::Tensor>& tensors) {
    const at::AutoGradMode mode(op.mode.grad);
    torch::jit::Stack stack = make_stack(op.arguments, tensors);
    op.handle.callBoxed(stack);
    for (size_t r = 0; r < op.results.size(); ++r) tensors[op.results[r]] = stack[r].toTensor();
  }

  const graph::Graph& graph_;
  const Plan& plan_;
  std::vector<std::vector<at::Tensor>> tensors_;
  std::vector<std::vector<at::Tensor>> entries_;
};

}  // namespace smp::partitioner::testing
