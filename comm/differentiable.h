// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "comm/communicator.h"

namespace smp::comm {

// The collectives that are linear maps of the ranks' tensors, as functions of libtorch's autograd:
// the gradient goes through the adjoint map, which is another of them. That of a tensor is the
// gradient of the sum of the ranks' losses, its terms added in ascending order of ranks. So the
// backward pass communicates in the same group, and is made by all its ranks. Results are new,
// contiguous tensors; tensors that are given may have any strides.

/// The ranks' tensors added up, or their average: the same shape. Other reductions have no
/// gradient; see `check_needs_no_gradient`.
at::Tensor all_reduce(const CommunicatorPtr& group, const at::Tensor& tensor, ReduceOp op);

/// The ranks' tensors of shape [...] as one of shape [size, ...].
at::Tensor all_gather(const CommunicatorPtr& group, const at::Tensor& tensor);

/// This rank's row of the reduction of the ranks' tensors: [size, ...] to [...].
at::Tensor reduce_scatter(const CommunicatorPtr& group, const at::Tensor& tensor, ReduceOp op);

/// Row r comes from rank r, whose row of this rank's number it is: [size, ...] to [size, ...].
at::Tensor all_to_all(const CommunicatorPtr& group, const at::Tensor& tensor);

/// The tensor of rank `root`.
at::Tensor broadcast(const CommunicatorPtr& group, const at::Tensor& tensor, int root);

/// Throws a `UsageError` if autograd would record operators on `tensor`. `call` is one that it does
/// not see, or whose result has no gradient; `reason` says which.
void check_needs_no_gradient(const std::string& call, const char* reason, const at::Tensor& tensor);

}  // namespace smp::comm
