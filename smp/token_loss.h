// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "smp/export.h"

namespace smp {

/// The number of tokens that count in the batches of all replicas, for `mean_over_tokens`: the sum
/// of `counted`, which has for each target of this rank's batch whether it counts, or its weight:
/// `y.ne(-100)`. Where none counts it is 1. A tensor without axes, the same on all ranks: integers
/// for truth values and integers. Collective over the replicas; between steps.
///
/// Where the gradients of several calls add up, give it the targets of all of them.
[[nodiscard]] SMP_API at::Tensor count_tokens(const at::Tensor& counted);

/// A microbatch's loss, from the sum of the losses of its tokens and `count_tokens` of the batch:
/// such that the mean over the microbatches of all replicas, which gradients and
/// `reduce_mean(smp::CommGroup::kDp)` are, is the mean over all tokens of the step. It is
/// `sum * microbatches / tokens`, with the number of microbatches of all replicas, so that the
/// bits do not depend on the layout. Outside of a step function, as with
/// `DistributedDataParallel`, a rank's batch counts as one microbatch.
///
/// Throws `UsageError` where a model's gradients are not averaged over microbatches
/// (`ModelOptions().average_grads_across_microbatches(false)`).
///
/// Example:
/// \code
///   auto train = smp::step([&](torch::Tensor x, torch::Tensor y, torch::Tensor tokens) {
///     auto sum = F::cross_entropy(model(x), y,
///     F::CrossEntropyFuncOptions().reduction(torch::kSum)); auto loss = smp::mean_over_tokens(sum,
///     tokens); model->backward(loss); return loss;
///   });
///   const auto tokens = smp::count_tokens(y.ne(-100));
///   auto loss = train(x, y, smp::whole(tokens)).reduce_mean(smp::CommGroup::kDp);
/// \endcode
[[nodiscard]] SMP_API at::Tensor mean_over_tokens(const at::Tensor& sum, const at::Tensor& tokens);

}  // namespace smp
