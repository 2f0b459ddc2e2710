// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "smp/export.h"

namespace smp::nn {

// Operators on tensors that the ranks of a tensor-parallel group divide. A *whole* tensor is one
// that all ranks hold alike; of a *divided* one each holds its part (see ParameterSplit). All ranks
// of the group call the same operators in the same order. The group is that of the calling rank at
// the call; the backward pass uses the same one, on whatever thread it runs.
//
// Each is an operator of the dispatcher, smp::tp_..., with the formula of its gradient: a step
// captures it as one operator, and replays it. Dimensions may be counted from the end (-1 is the
// last); in the operators' arguments they never are. In a group of one rank, each is plain
// libtorch's (or returns `x` itself) and no operator of ours is called.

/// The number of ranks in the calling rank's tensor-parallel group, and its rank there, for modules
/// with parameters of their own that are divided. Throw `UsageError` before `smp::init`.
SMP_API int group_size();
SMP_API int group_rank();

/// Enters a whole `x` into a divided region: the same values, on the memory of `x`; the gradients
/// of all ranks are summed (smp::tp_copy, Megatron's f). The result must not be written in place:
/// where gradients are recorded, autograd refuses.
SMP_API at::Tensor copy_to_group(const at::Tensor& x);

/// Ends a divided region whose ranks hold terms of a sum: the sum over the ranks, in the order of
/// the ranks; the gradient is passed on as it is (smp::tp_reduce, Megatron's g).
SMP_API at::Tensor reduce_from_group(const at::Tensor& x);

/// This rank's part of a whole `x` along `dim` in `blocks` blocks; gradients are gathered
/// (smp::tp_scatter). Throws `UsageError` if the size is no multiple of blocks x ranks.
SMP_API at::Tensor scatter_to_group(const at::Tensor& x, int64_t dim, int64_t blocks = 1);

/// The whole of all ranks' `x`, which divide it along `dim` in `blocks` blocks; each rank gets its
/// part of the gradient, which is taken to be whole (smp::tp_gather).
SMP_API at::Tensor gather_from_group(const at::Tensor& x, int64_t dim, int64_t blocks = 1);

/// Sequence parallelism: the whole of all ranks' `x` along `dim`, which enters a divided region:
/// the gradients of all ranks are summed, and each gets its part (smp::tp_all_gather).
SMP_API at::Tensor all_gather_to_group(const at::Tensor& x, int64_t dim);

/// Sequence parallelism: this rank's part, along `dim`, of the sum of all ranks' `x`; gradients are
/// gathered (smp::tp_reduce_scatter).
SMP_API at::Tensor reduce_scatter_from_group(const at::Tensor& x, int64_t dim);

/// Sequence parallelism: `at::linear` of all_gather_to_group(x, dim), with the same bits, that
/// keeps this rank's part `x` for the backward pass instead of the whole, and gathers it again
/// there if the weight needs a gradient (smp::tp_gathered_linear). `weight` [outputs, channels of
/// x] and `bias` [outputs] are this rank's; the gradient of `x` is the rank's part of the sum over
/// the ranks. Under autocast `x` is cast before it is gathered. Throws `UsageError` if `dim` is the
/// last dimension.
SMP_API at::Tensor gathered_linear(const at::Tensor& x, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias, int64_t dim);

/// Divides `x` along `split_dim`, gives rank r the r-th part, and joins those received along
/// `join_dim` in the order of the ranks; gradients go the way back (smp::tp_all_to_all). So a
/// tensor divided along `join_dim` becomes one divided along `split_dim`.
SMP_API at::Tensor all_to_all_in_group(const at::Tensor& x, int64_t split_dim, int64_t join_dim);

/// Dropout of a divided tensor (along `dim`, in `blocks` blocks): draws the mask of the whole as
/// `torch::dropout` does in one process for a contiguous tensor, the same numbers from the default
/// generator, and keeps this rank's part (smp::tp_dropout).
SMP_API at::Tensor divided_dropout(const at::Tensor& x, double p, bool train, int64_t dim,
                                   int64_t blocks = 1);

/// The rows of a vocabulary whose rank r has the r-th part in `weight` [num_embeddings / ranks,
/// width]; zeros for indices that other ranks have, so that reduce_from_group() makes the whole
/// (smp::tp_embedding). `padding_idx` is an index of the whole, -1 for none: its row gets no
/// gradient. Throws `UsageError` for an index outside the vocabulary (on the CPU).
SMP_API at::Tensor divided_embedding(const at::Tensor& weight, const at::Tensor& indices,
                                     int64_t num_embeddings, int64_t padding_idx = -1,
                                     bool scale_grad_by_freq = false);

/// Cross entropy of logits [N, C / ranks] or [N, C / ranks, d1, ...] whose rank r has the r-th part
/// of the classes (smp::tp_cross_entropy). Only the maximum and sums over the classes, numbers for
/// each sample, travel. The result is whole, and each rank gets the gradient of its logits.
/// `target` [N, d1, ...] holds class indices of the whole, `weight` [C] is whole; `reduction` is an
/// `at::Reduction`, the rest as in `at::cross_entropy_loss`. Computed in float32 for half
/// precision. Throws `UsageError` for shapes that do not fit, targets that are no class (on the
/// CPU), and a second differentiation.
SMP_API at::Tensor divided_cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                                         const std::optional<at::Tensor>& weight, int64_t reduction,
                                         int64_t ignore_index = -100, double label_smoothing = 0);

}  // namespace smp::nn
