// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <exception>
#include <string>

#include "graph/graph.h"

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace smp::graph {

/// A tensor of this form without history on `storage`, from its `offset`-th element on.
at::Tensor tensor_on(c10::Storage storage, const TensorMeta& meta, int64_t offset = 0);

/// A tensor with the given sizes, strides, dtype, device and `requires_grad` and no data. Reading
/// its data throws an error that says `step_name`; `backward()` on it throws as well. `step_name`
/// is shared by all placeholders of a run.
at::Tensor make_placeholder(const TensorMeta& meta, const std::string& step_name);

/// The gradient history that all placeholders of this thread share, so that a hook that user code
/// attaches to the history of one is found here. A tracer answers passes that would go back through
/// it.
torch::autograd::Node& placeholder_history();

/// Gives `tensor`, a placeholder or a factory's result, the sizes, strides and `requires_grad` that
/// an in-place operator left it with.
void follow_in_place(const at::Tensor& tensor, const TensorMeta& meta);

/// Takes the data of a tensor's storage away, so that reading it throws as with a placeholder.
void become_placeholder(const at::Tensor& tensor, const std::string& step_name);

/// True for a tensor that `make_placeholder` or `become_placeholder` made, or an alias of one.
bool is_placeholder(const at::Tensor& tensor);
bool is_placeholder(c10::StorageImpl& storage);

/// Makes a new tensor require a gradient, as a placeholder does: it is no leaf, and `backward()` on
/// it throws.
void give_placeholder_history(const at::Tensor& tensor);

/// Gives the tensor's place in the history that placeholders share a number; does nothing to a
/// tensor with another history.
void number_placeholder(const at::Tensor& tensor, uint32_t number);

/// A tensor of this shape with zeros, or another number, in all of its memory. It has no history.
at::Tensor make_filled(const TensorMeta& meta, at::Device device, int fill);

/// The meta tensor that stands for `result`, which an operator made of `filled`, for which `shapes`
/// stand: one of those, a view of one, or a new one.
at::Tensor to_shape(const at::Tensor& result, const std::vector<at::Tensor>& filled,
                    const std::vector<at::Tensor>& shapes);

/// Returns the result of `call(0)`, which runs operators on tensors of `device` that are filled
/// with zeros; or, on the CPU, the result of `call(1)` if they take no zeros (`multinomial`).
/// Throws the error on zeros if neither returns. Another device gets no second try: its kernels may
/// assert, which ends it for the process (an index of 1 into a table of one row).
template <class Call>
auto on_zeros_or_ones(at::Device device, const Call& call) {
  if (!device.is_cpu()) return call(0);
  try {
    return call(0);
  } catch (const c10::Error&) {
    const auto zeros = std::current_exception();
    try {
      return call(1);
    } catch (const c10::Error&) {
    }
    std::rethrow_exception(zeros);
  }
}

/// A tensor on the meta device with this shape, for `call_on_shapes`.
at::Tensor make_shape_tensor(const TensorMeta& meta);

/// Calls the operator on meta tensors (`make_shape_tensor`), so that nothing is computed. Device
/// arguments must have been replaced by the meta device. An operator that has no meta kernel, here
/// or in libtorch, runs on zeros of the CPU instead, or on ones if it takes no zeros, which costs
/// its compute but gives the exact shapes. One that the CPU refuses both ways (it has no kernel, or
/// none for such a type), that lays out its result in another way by device, or whose types
/// autocast chooses, runs on zeros of `device`.
void call_on_shapes(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                    at::Device device = at::kCPU);

}  // namespace smp::graph
