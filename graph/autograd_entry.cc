// SPDX-License-Identifier: Apache-2.0
#include "graph/autograd_entry.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "core/node.h"

namespace smp::graph {

at::Tensor dense(at::Tensor gradient) {
  return gradient.defined() && gradient.is_sparse() ? gradient.to_dense() : gradient;
}

at::Tensor enter(const at::Tensor& data, const GradientSinkPtr& sink) {
  at::Tensor entered = data.variable_data();
  if (sink == nullptr) return entered;
  sink->add_input_metadata(entered);
  if (data.is_leaf() && data.requires_grad() && !data.is_view()) {
    entered.set_requires_grad(true);
    torch::autograd::impl::set_grad_accumulator(entered, core::WeakNodePtr(core::NodePtr(sink)));
    return entered;
  }
  torch::autograd::impl::set_gradient_edge(entered, {sink, 0});
  return entered;
}

at::Tensor enter_unlinked(const at::Tensor& data) {
  const at::Tensor leaf = data.variable_data().set_requires_grad(true);
  const at::NoGradGuard no_grad;
  return leaf.alias();
}

at::Tensor as_view(const at::Tensor& entered) {
  const at::AutoGradMode with_history(true);
  return entered.alias();
}

torch::autograd::Edge start_of_backward(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return {};
  return torch::autograd::impl::gradient_edge(tensor);
}

void run_backward(const std::vector<torch::autograd::Edge>& starts,
                  const std::vector<at::Tensor>& gradients) {
  torch::autograd::edge_list roots;
  torch::autograd::variable_list inputs;
  for (size_t i = 0; i < starts.size(); ++i) {
    if (!starts[i].is_valid() || !gradients[i].defined()) continue;
    roots.push_back(starts[i]);
    inputs.push_back(gradients[i]);
  }
  if (roots.empty()) return;
  torch::autograd::Engine::get_default_engine().execute(
      roots, inputs, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true);
}

}  // namespace smp::graph
