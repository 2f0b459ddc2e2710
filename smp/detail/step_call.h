// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

namespace smp::detail {

/// How a tensor is cut into microbatches.
struct Cut {
  std::optional<int64_t> axis;  ///< from the end if negative; none: each gets the whole
  bool is_named = false;        ///< the program has named the axis
};

/// One call of a step function, with types erased: see `Step`.
struct StepCall {
  /// The defined tensors found in the arguments, in order, and by tensor: how it is cut, and its
  /// number among all that were found, the undefined ones too (-1: in no argument).
  std::vector<at::Tensor> tensors;
  std::vector<Cut> cuts;
  std::vector<int> places;
  /// Into how many microbatches the batch is cut.
  int64_t microbatches = 1;
  /// An argument slices itself (`smp_slice`), so microbatches may differ in more than tensors.
  bool per_microbatch = false;
  /// Whether the result of `function` in the last guarded call is known, so that it need not run
  /// again.
  bool has_last_result = false;
  /// Calls the user's function with these tensors in place of the arguments' and returns the
  /// tensors found in its result.
  std::function<std::vector<at::Tensor>(int microbatch, const std::vector<at::Tensor>&)> function;
};

/// Returned tensors by position and microbatch.
using StepResults = std::vector<std::vector<at::Tensor>>;

}  // namespace smp::detail
