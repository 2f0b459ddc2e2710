// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <vector>

#include "graph/graph.h"
#include "graph/tensor_table.h"

namespace smp::graph {

/// A call of an operator by a step function.
struct TracedCall {
  const c10::OperatorHandle* op = nullptr;
  ExecutionMode mode;
  std::vector<Argument> arguments;
  std::vector<at::Tensor> tensors;  ///< among the arguments, in their order
  std::vector<ValueId> ids;         ///< values of the tensors
  bool absolute_offset = false;     ///< it counted from the start of its argument's storage

  /// Reads the arguments on the stack of a call of `op`. `value_of` finds the value of a tensor,
  /// which may be undefined.
  void read(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
            c10::function_ref<ValueId(const at::Tensor&)> value_of);
  /// An input lies somewhere else in its storage in each microbatch, and a tensor that crossed
  /// between ranks has a storage of its own: so an offset is captured only if it is the tensor's
  /// own, as None. Parameters and buffers, which are in `table`, stay where they are.
  void make_offset_relative(const TensorTable& table);

  /// The values that the operator writes.
  c10::SmallVector<ValueId, 1> written() const;
  /// Keeps the memory for another call.
  void clear();
};

}  // namespace smp::graph
