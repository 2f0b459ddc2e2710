// SPDX-License-Identifier: Apache-2.0
// The part of Tracer that follows histories, by which gradients flow: which tensors get one, and
// the function's questions about one.

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string_view>

#include "core/check.h"
#include "graph/capture.h"
#include "graph/differentiate.h"
#include "graph/guard.h"
#include "graph/shapes.h"
#include "graph/tracer.h"

namespace smp::graph {
namespace {

/// The name of the custom function that a node of the autograd graph calls; empty for other nodes.
std::string custom_function_of(const torch::autograd::Node& node) {
  constexpr std::string_view kWrapper = "torch::autograd::CppNode<";
  const std::string name = node.name();
  if (name.compare(0, kWrapper.size(), kWrapper) != 0) return "";
  return name.substr(kWrapper.size(), name.size() - kWrapper.size() - 1);
}

}  // namespace

/// Lets the function's tensors show an operator's effects in place. Only a leaf writes parameters,
/// which keep their history.
void Tracer::follow(const at::Tensor& tensor, const TensorMeta& meta) {
  const auto* entry = options_.table->find(tensor);
  if (entry != nullptr && entry->kind == ValueKind::kParameter) return;
  if (meta.requires_grad && !tensor.requires_grad()) {
    history_begins_ = true;
    note_history(tensor);
  }
  follow_in_place(tensor, meta);
}

/// A tensor gets a history. Registered tensors outlive the run, and their histories do not.
void Tracer::note_history(const at::Tensor& tensor) {
  if (options_.table->find(tensor) != nullptr) histories_.push_back(tensor);
}

void Tracer::end_histories() {
  for (const at::Tensor& tensor : std::exchange(histories_, {})) {
    torch::autograd::impl::set_gradient_edge(tensor, torch::autograd::Edge());
  }
}

/// A history that an operator gives to memory holds wherever the memory is seen: the function's
/// other views of it require a gradient from now on.
void Tracer::spread_history(const Operator& op) {
  if (!std::exchange(history_begins_, false)) return;
  known_.for_each_alive([&](const auto& owner, const Known& known) {
    const int set = value(known.id).alias_set;
    const bool written = std::find(op.writes.begin(), op.writes.end(), set) != op.writes.end();
    const at::Tensor tensor{owner};
    if (!written || tensor.requires_grad()) return true;
    const bool now = guard_ != nullptr ? guard_->requires_grad(known.id)
                                       : capture_->concrete(known.id).requires_grad();
    if (now) {
      note_history(tensor);
      give_placeholder_history(tensor);
      bind(tensor, known.id);
    }
    return true;
  });
}

/// From now on the function's tensor is the result of `smp::requires_grad` for the old one.
ValueId Tracer::require_grad(const at::Tensor& tensor, const at::Tensor& as_before) {
  const bool on = tensor.requires_grad();
  if (on) ends_.push_back(torch::autograd::impl::grad_accumulator(tensor));
  return derive(tensor, "smp::requires_grad", {as_before, on});
}

/// A custom autograd function is not an operator: its forward's operators are seen, with gradients
/// off, its backward is not.
void Tracer::check_history(const at::Tensor& tensor) const {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || meta->grad_fn_ == nullptr) return;
  const std::string function = custom_function_of(*meta->grad_fn_);
  if (function.empty()) return;
  refuse("uses the result of the custom autograd function " + function +
             ", whose backward cannot be captured",
         "Write the function with differentiable tensor operators, or make the module that applies "
         "it a leaf: smp::leaf(module)(x)");
}

/// The result of a custom function that works in place may be seen through another view only.
void Tracer::watch_custom_function(const TracedCall& call) {
  for (const at::Tensor& tensor : inner_arguments_) check_history(tensor);
  for (const at::Tensor& tensor : call.tensors) {
    if (tensor.defined() && !at::GradMode::is_enabled()) inner_arguments_.push_back(tensor);
  }
}

void Tracer::custom_function() { custom_function_ |= at::GradMode::is_enabled(); }

/// The tensor whose gradient goes by an edge; undefined if the function has not used it.
at::Tensor Tracer::end_of(const torch::autograd::Edge& edge) {
  if (edge.function.get() == history_) return tensor_for(static_cast<ValueId>(edge.input_nr));
  const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
  return leaf == nullptr ? at::Tensor() : leaf->variable;
}

/// `autograd::grad` is an operator of the graph. Its inputs that no operator has read have no end.
std::optional<torch::autograd::variable_list> Tracer::differentiate(const BackwardPass& pass) {
  if (pass.accumulate) {
    core::fail<UsageError>(
        where(),
        ": backward() was called inside it, which would add to the gradients of one microbatch. "
        "The step runs the pipeline's backward pass itself: call model->backward(loss) instead, or "
        "torch::autograd::grad for gradients that the function goes on to use");
  }
  SMP_CHECK_WITH(UsageError, backwards_ == 0, where(),
                 ": autograd::grad was called after backward, which is the end of the history. "
                 "Call it before model->backward");
  const UninterceptedScope own;
  std::vector<at::Tensor> outputs, inputs;
  for (const auto& edge : pass.roots) outputs.push_back(end_of(edge));
  std::vector<size_t> known;
  for (size_t i = 0; i < pass.inputs.size(); ++i) {
    const at::Tensor input = end_of(pass.inputs[i]);
    if (!input.defined()) continue;
    known.push_back(i);
    inputs.push_back(input);
  }
  torch::jit::Stack stack{outputs, pass.gradients, inputs, pass.keep_graph, pass.create_graph};
  call(grad_operator(), stack);
  const std::vector<at::Tensor> results = stack[0].toTensorVector();
  torch::autograd::variable_list gradients(pass.inputs.size());
  for (size_t i = 0; i < known.size(); ++i) gradients[known[i]] = results[i];
  return gradients;
}

void Tracer::retain_grad() {
  refuse("calls retain_grad() on a tensor, whose gradient would not be kept",
         "Gradients of parameters are complete when the step has returned. For that of another "
         "tensor, add a parameter of zeros to it");
}

}  // namespace smp::graph
