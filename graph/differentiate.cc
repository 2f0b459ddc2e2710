// SPDX-License-Identifier: Apache-2.0
#include "graph/differentiate.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <algorithm>

namespace smp::graph {
namespace {

std::vector<at::Tensor> grad(at::TensorList outputs, at::TensorList gradients,
                             at::TensorList inputs, bool keep_graph, bool create_graph) {
  return torch::autograd::grad(outputs.vec(), inputs.vec(), gradients.vec(), keep_graph,
                               create_graph, /*allow_unused=*/true);
}

at::Tensor requires_grad(const at::Tensor& self, bool on) {
  return self.detach().set_requires_grad(on);
}

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
      "grad(Tensor[] outputs, Tensor[] gradients, Tensor[] inputs, bool keep_graph, "
      "bool create_graph) -> Tensor[]",
      torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, &grad));
  m.def("requires_grad(Tensor(a) self, bool on) -> Tensor(a)",
        torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, &requires_grad));
}

/// The inputs of `smp::grad`.
const Argument& wanted(const Operator& op) { return op.arguments[2]; }

bool reads(const Operator& op, const Argument& values) {
  return std::any_of(op.arguments.begin(), op.arguments.end(), [&](const Argument& argument) {
    return std::any_of(argument.values.begin(), argument.values.end(), [&](ValueId id) {
      return std::find(values.values.begin(), values.values.end(), id) != values.values.end();
    });
  });
}

}  // namespace

const c10::OperatorHandle& grad_operator() {
  static const auto handle = find("smp::grad");
  return handle;
}

const c10::OperatorHandle& requires_grad_operator() {
  static const auto handle = find("smp::requires_grad");
  return handle;
}

int first_reader(const Graph& graph, const Operator& op) {
  const auto first =
      std::find_if(graph.operators.begin(), graph.operators.end(),
                   [&](const Operator& reader) { return reads(reader, wanted(op)); });
  return static_cast<int>(first - graph.operators.begin());
}

std::vector<DifferentiatedRange> differentiated_ranges(const Graph& graph) {
  std::vector<DifferentiatedRange> ranges;
  for (size_t last = 0; last < graph.operators.size(); ++last) {
    if (!(graph.operators[last].handle == grad_operator())) continue;
    ranges.push_back({first_reader(graph, graph.operators[last]), static_cast<int>(last)});
  }
  return ranges;
}

}  // namespace smp::graph
