// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace smp::graph {

/// The operator
///
///   smp::not_equal(Tensor a, Tensor b) -> Tensor
///
/// which stands in a graph where the step function called `torch::equal` on two tensors and was
/// told that they differ. Throws `CaptureError` when they do not, and returns an empty tensor.
const c10::OperatorHandle& not_equal_operator();

}  // namespace smp::graph
