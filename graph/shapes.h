#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <string>

#include "graph/graph.h"

namespace smp::graph {

/// A tensor with the given sizes, strides, dtype, device and `requires_grad` and no data. What
/// reads its data throws an error that says `step_name`; `backward()` on it throws as well.
/// `step_name` is shared by all placeholders of a run.
at::Tensor make_placeholder(const TensorMeta& meta, const std::string& step_name);

/// True for a tensor that `make_placeholder` made, or a shallow copy of one.
bool is_placeholder(const at::Tensor& tensor);

/// A tensor on the meta device with this shape, for `call_on_shapes`.
at::Tensor make_shape_tensor(const TensorMeta& meta);

/// Calls the operator on meta tensors (`make_shape_tensor`), so that nothing is computed. Device
/// arguments must have been replaced by the meta device. An operator that has no meta kernel in
/// C++ (capture-facts: convolution, batch_norm, relu ...) runs on zeros of the CPU instead, which
/// costs its compute but gives the exact shapes.
void call_on_shapes(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace smp::graph
