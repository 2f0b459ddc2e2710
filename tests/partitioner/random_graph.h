#pragma once

#include <ATen/ops/ones.h>

#include <random>
#include <vector>

#include "partitioner/plan.h"
#include "tests/partitioner/graph_builder.h"

namespace smp::partitioner::testing {

/// A random program on 2x2 to 4x4 tensors of small whole numbers, so that results are exact:
/// in-place operators, views of views, several outputs. The operators run under no_grad.
class RandomProgram {
 public:
  explicit RandomProgram(unsigned seed) : random_(seed) {
    builder_.grad_mode = false;
    const int based = 1 + pick(3);
    add(builder_.input(numbers()));
    for (int i = 0; i < based; ++i) add_based(i);
    const int operators = 3 + pick(8);
    while (static_cast<int>(builder_.graph().operators.size()) < operators) add_operator();
    for (size_t i = 0; i < live_.size(); ++i) {
      if (i + 1 == live_.size() || pick(4) == 0) builder_.output(live_[i]);
    }
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
    live_.push_back(ref);
    initial_.push_back(builder_.tensor(ref).clone());
  }

  void add_based(int index) {
    const std::string name = "t" + std::to_string(index);
    switch (pick(3)) {
      case 0:
        return add(builder_.frozen(name, numbers()));
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
    try {
      switch (pick(9)) {
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
      return;  // shapes that do not fit
    }
  }

  /// As in C++: the tensor object goes on under the id of the operator's result.
  void in_place(size_t a, Ref result) { live_[a] = result; }

  std::mt19937 random_;
  GraphBuilder builder_;
  std::vector<Ref> live_;  ///< per tensor object, its newest id
  std::vector<at::Tensor> initial_;
};

/// Runs a plan on one machine as ranks would: every stage has its own copies of inputs,
/// parameters, buffers and constants, and a value crosses as a copy of its own.
class StagedRun {
 public:
  StagedRun(const graph::Graph& graph, const Plan& plan, const std::vector<at::Tensor>& initial)
      : graph_(graph), plan_(plan), tensors_(plan.stages) {
    for (std::vector<at::Tensor>& of_stage : tensors_) {
      of_stage.resize(graph.values.size());
      for (size_t v = 0; v < initial.size(); ++v) of_stage[v] = initial[v].clone();
    }
    for (int stage = 0; stage < plan.stages; ++stage) {
      for (size_t i = 0; i < graph.operators.size(); ++i) {
        if (plan.stage_of_operator[i] == stage) run(graph.operators[i], tensors_[stage]);
      }
      for (const Transfer& transfer : plan.transfers) {
        if (transfer.from != stage) continue;
        tensors_[transfer.to][transfer.value] = tensors_[stage][transfer.value].clone();
      }
    }
  }

  at::Tensor tensor(int stage, graph::ValueId value) const { return tensors_[stage][value]; }

  at::Tensor output(size_t index) const {
    return tensors_[plan_.stage_of_output[index]][graph_.outputs[index]];
  }

 private:
  static void run(const graph::Operator& op, std::vector<at::Tensor>& tensors) {
    torch::jit::Stack stack = make_stack(op.arguments, tensors);
    op.handle.callBoxed(stack);
    for (size_t r = 0; r < op.results.size(); ++r) tensors[op.results[r]] = stack[r].toTensor();
  }

  const graph::Graph& graph_;
  const Plan& plan_;
  std::vector<std::vector<at::Tensor>> tensors_;
};

}  // namespace smp::partitioner::testing
