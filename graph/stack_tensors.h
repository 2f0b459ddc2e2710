// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <functional>
#include <vector>

namespace smp::graph {

/// Changes one tensor into another. Undefined tensors are passed too.
using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

/// The value with each tensor in it (alone, in a `Tensor[]` or in a `Tensor?[]`) mapped, in order.
/// Other values are returned as they are.
c10::IValue map_tensors(const c10::IValue& value, const TensorMap& map);

/// The tensors in the last `count` values of the stack, in order; undefined where there is none.
std::vector<at::Tensor> tensors_in(const torch::jit::Stack& stack, size_t count);

}  // namespace smp::graph
