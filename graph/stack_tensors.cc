// SPDX-License-Identifier: Apache-2.0
#include "graph/stack_tensors.h"

namespace smp::graph {

c10::IValue map_tensors(const c10::IValue& value, const TensorMap& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(map(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      const at::Tensor mapped = map(tensor.value_or(at::Tensor()));
      list.push_back(mapped.defined() ? std::optional(mapped) : std::nullopt);
    }
    return list;
  }
  return value;
}

std::vector<at::Tensor> tensors_in(const torch::jit::Stack& stack, size_t count) {
  std::vector<at::Tensor> tensors;
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    map_tensors(stack[i], [&](const at::Tensor& tensor) {
      tensors.push_back(tensor);
      return tensor;
    });
  }
  return tensors;
}

}  // namespace smp::graph
