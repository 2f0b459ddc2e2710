// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "runtime/parameters/whole.h"

// The norm over gradients that lie on several ranks, without regard to whose they are:
// `clip_grad.h` has the public functions. Internal.
namespace smp::runtime {

/// The norm of one parameter's gradient.
struct GradientNorm {
  /// The result of optim::gradient_norm, undefined where there is no gradient or another rank has
  /// the norm. Several ranks may have the same. With a `norm_type` of infinity it may be that of a
  /// part of the gradient, of which other ranks have the others.
  at::Tensor norm;
  /// Type of `norm`, on all ranks alike.
  at::ScalarType dtype = at::kFloat;
};

/// Numbers of which each rank has some, the others undefined: all that some rank has, on every
/// rank. The largest of several counts. One all-reduce.
std::vector<std::optional<double>> share_norms(const std::vector<at::Tensor>& norms,
                                               comm::Communicator& group);

/// The norm over all gradients, on every rank, with the bits that torch::nn::utils::clip_grad_norm_
/// computes from the same gradients in one process. `norms` has an element for each parameter, in
/// the same order on all ranks of `group`. One all-reduce of as many numbers, and no other
/// communication.
///
/// Throws `UsageError` on all ranks where `fingerprint` (up to 2^53), which tells each rank's
/// arguments, differs; `call` is the function's name in it.
at::Tensor total_norm(const std::vector<GradientNorm>& norms, double norm_type,
                      comm::Communicator& group, uint64_t fingerprint = 0,
                      const std::string& call = "the norm of gradients");

/// Norms of order `norm_type` of tensors that lie on ranks as parameters do, by index of `held`.
/// For the order of a sum to be that of one process, each tensor is put together on one of the
/// ranks that have some of it, which has its norm then; the others' are undefined. With infinity
/// every rank has the norm of its own tensors, and nothing is sent. Otherwise as `for_each_whole`.
std::vector<at::Tensor> norms_of_wholes(const Runtime& runtime, const std::vector<Held>& held,
                                        double norm_type);

}  // namespace smp::runtime
