// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/shape_run.h"

#include <map>

#include "graph/mode_scope.h"
#include "graph/shapes.h"
#include "graph/visit.h"
#include "graph/written_results.h"

namespace smp::nn::rewrite {
namespace {

using graph::Argument;
using graph::Graph;
using graph::kUndefined;
using graph::Operator;
using graph::TensorMeta;
using graph::ValueId;

class ShapeRun {
 public:
  ShapeRun(const Graph& graph, const Operator& op, const std::set<ValueId>& requires_grad)
      : graph_(graph), op_(op), requires_grad_(requires_grad) {}

  std::vector<ShapeResult> run() {
    const graph::ModeScope mode(op_.mode);
    torch::jit::Stack stack;
    push_arguments(stack);
    graph::call_for_results(op_.handle, stack,
                            [&] { graph::call_on_shapes(op_.handle, stack, device()); });
    std::vector<ShapeResult> results;
    for (const c10::IValue& value : stack) {
      if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) results.push_back(result(tensor));
      } else {
        results.push_back(result(value.toTensor()));
      }
    }
    return results;
  }

 private:
  /// A value has one tensor, however often it is an argument.
  at::Tensor tensor(ValueId id) {
    if (id == kUndefined) {
      tensors_.emplace_back();
      return {};
    }
    at::Tensor& own = of_value_[id];
    if (!own.defined()) {
      TensorMeta meta = graph_.values[id].meta;
      meta.requires_grad |= requires_grad_.count(id) > 0;
      own = graph::make_shape_tensor(meta);
    }
    tensors_.push_back(own);
    return own;
  }

  void push_arguments(torch::jit::Stack& stack) {
    const auto& schema = op_.handle.schema();
    for (size_t i = 0; i < op_.arguments.size(); ++i) {
      const Argument& argument = op_.arguments[i];
      const bool is_device = schema.arguments()[i].name() == "device";
      stack.push_back(is_device && argument.constant.isDevice()
                          ? c10::IValue(c10::Device(at::kMeta))
                          : graph::to_ivalue(argument, [this](ValueId id) { return tensor(id); }));
    }
  }

  /// The device of the results: that of the first argument that has dimensions.
  at::Device device() const {
    for (const auto& [id, tensor] : of_value_) {
      if (!graph_.values[id].meta.sizes.empty()) return graph_.values[id].meta.device;
    }
    return at::kCPU;
  }

  ShapeResult result(const at::Tensor& tensor) const {
    ShapeResult result;
    result.defined = tensor.defined();
    if (!result.defined) return result;
    result.meta = TensorMeta::of(tensor);
    if (tensor.is_meta()) result.meta.device = device();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!tensors_[i].defined()) continue;
      if (tensors_[i].is_same(tensor)) {
        result.alias_of = static_cast<int>(i);
        result.is_argument = true;
        return result;
      }
      if (tensors_[i].storage().is_alias_of(tensor.storage()))
        result.alias_of = static_cast<int>(i);
    }
    return result;
  }

  const Graph& graph_;
  const Operator& op_;
  const std::set<ValueId>& requires_grad_;
  std::map<ValueId, at::Tensor> of_value_;
  std::vector<at::Tensor> tensors_;  // those that `Operator::result_is_argument` counts
};

}  // namespace

std::vector<ShapeResult> run_on_shapes(const Graph& graph, const Operator& op,
                                       const std::set<ValueId>& requires_grad) {
  return ShapeRun(graph, op, requires_grad).run();
}

}  // namespace smp::nn::rewrite
