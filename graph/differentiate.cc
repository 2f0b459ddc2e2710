// SPDX-License-Identifier: Apache-2.0
#include "graph/differentiate.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <algorithm>

#include "graph/autograd_entry.h"
#include "graph/requires_grad.h"
#include "graph/visit.h"

namespace smp::graph {
namespace {

std::vector<at::Tensor> grad(at::TensorList outputs, at::TensorList gradients,
                             at::TensorList inputs, bool keep_graph, bool create_graph) {
  auto results = torch::autograd::grad(outputs.vec(), inputs.vec(), gradients.vec(), keep_graph,
                                       create_graph, /*allow_unused=*/true);
  for (at::Tensor& result : results) result = dense(std::move(result));
  return results;
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

bool reads(const Operator& op, const std::vector<ValueId>& values) {
  bool found = false;
  for_each_argument(op, [&](ValueId id) {
    found |= std::find(values.begin(), values.end(), id) != values.end();
  });
  return found;
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

std::vector<ValueId> differentiated(const Graph& graph, const std::vector<Argument>& arguments) {
  std::vector<ValueId> values;
  for (ValueId input : arguments[2].values) {
    const std::vector<ValueId> names = with_earlier_names(graph, input);
    values.insert(values.end(), names.begin(), names.end());
  }
  return values;
}

bool makes_in_place(const Graph& graph, const Operator& op, const std::vector<ValueId>& values) {
  bool found = false;
  for_each_result(op, [&](ValueId id) {
    found |=
        writes_to(graph, op, id) && std::find(values.begin(), values.end(), id) != values.end();
  });
  return found;
}

int first_in_range(const Graph& graph, const Operator& op) {
  const std::vector<ValueId> values = differentiated(graph, op.arguments);
  const auto first =
      std::find_if(graph.operators.begin(), graph.operators.end(), [&](const Operator& reader) {
        return reads(reader, values) || makes_in_place(graph, reader, values);
      });
  return static_cast<int>(first - graph.operators.begin());
}

std::vector<DifferentiatedRange> differentiated_ranges(const Graph& graph) {
  std::vector<DifferentiatedRange> ranges;
  for (size_t last = 0; last < graph.operators.size(); ++last) {
    if (!(graph.operators[last].handle == grad_operator())) continue;
    ranges.push_back({first_in_range(graph, graph.operators[last]), static_cast<int>(last)});
  }
  return ranges;
}

}  // namespace smp::graph
