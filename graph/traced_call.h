// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <vector>

#include "graph/graph.h"

namespace smp::graph {

/// A call of an operator by a step function.
struct TracedCall {
  const c10::OperatorHandle* op = nullptr;
  std::vector<Argument> arguments;
  std::vector<at::Tensor> tensors;  ///< among the arguments, in their order
  std::vector<ValueId> ids;         ///< values of the tensors
  bool absolute_offset = false;     ///< it counted from the start of its argument's storage

  /// The values that the operator writes.
  c10::SmallVector<ValueId, 1> written() const;
  /// Keeps the memory for another call.
  void clear();
};

}  // namespace smp::graph
