// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "dp/parameter_slices.h"

// The norm over gradients that lie on several ranks, without regard to whose they are:
// `clip_grad.h` has the public functions. Internal.
namespace smp::runtime {

/// The norm of one parameter's gradient.
struct GradientNorm {
  /// What optim::gradient_norm gives, undefined where there is no gradient or another rank has the
  /// norm. Several ranks may have the same. With a `norm_type` of infinity it may be that of a part
  /// of the gradient, of which other ranks have the others.
  at::Tensor norm;
  /// Of `norm`, on all ranks alike.
  at::ScalarType dtype = at::kFloat;
};

/// The norm over all gradients, on every rank, with the bits that torch::nn::utils::clip_grad_norm_
/// computes from the same gradients in one process. `norms` has an element for each parameter, in
/// the same order on all ranks of `group`. One all-reduce of as many numbers, and no other
/// communication.
///
/// Throws `UsageError` on all ranks where `fingerprint` (up to 2^53), which says what each rank was
/// asked for, differs; `call` is what that calls the function.
at::Tensor total_norm(const std::vector<GradientNorm>& norms, double norm_type,
                      comm::Communicator& group, uint64_t fingerprint = 0,
                      const std::string& call = "the norm of gradients");

/// Norms of the gradients that replicas have in pieces, by parameter of `slices`. `piece(i)` is
/// this rank's piece of gradient i or undefined where it has none; what is not `wanted` is passed
/// over. For the order of the sum to be that of one process, each gradient is put together on one
/// of the ranks, which has its norm then; the others' are undefined. With infinity every rank has
/// the norm of its pieces, and nothing is sent. Otherwise collective over the group of `slices`:
/// one gather for each bucket, in which every rank sends its pieces. `as_summed`: gradients have
/// the dtype of their sums, not of their parameters (see dp::BucketOptions).
std::vector<at::Tensor> norms_of_pieces(const dp::ParameterSlices& slices,
                                        const std::function<at::Tensor(size_t)>& piece,
                                        const std::vector<bool>& wanted, double norm_type,
                                        bool as_summed = false);

}  // namespace smp::runtime
