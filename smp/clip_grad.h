// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "smp/detail/plain_arguments.h"
#include "smp/export.h"

namespace smp {

class ModelCore;

/// The norm of order `norm_type` (any number, infinity too) over the gradients of parameters on all
/// stages and replicas, each parameter counted once: the same on every rank, and the bits of
/// torch::nn::utils::clip_grad_norm_ over the same list in one process. A tensor without
/// dimensions; a zero if there are no gradients.
///
/// To be called after a step, with the same list on all ranks: all parameters of a model
/// (`model->parameters()`), some of them, or those of several models. Collective over the pipeline
/// and its tensor-parallel groups, and over all ranks with `shard_optimizer_state` or sharded data
/// parallelism. It is one all-reduce of a number for each parameter; gradients of which ranks have
/// parts or pieces are put together for it, since the bits of a sum depend on its order (infinity
/// takes the parts as they are).
///
/// Throws `UsageError` inside a step function, for tensors that are not parameters of a
/// `DistributedModel`, and where ranks call it with other arguments.
SMP_API at::Tensor grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2);

/// Multiplies the gradients of parameters, on whatever ranks they are, by max_norm / (norm + 1e-6)
/// if that is less than one, and returns the norm there was: `grad_norm`, which says more. With
/// `error_if_nonfinite` a norm that is infinite or no number is a `UsageError` on all ranks, and
/// nothing is changed; otherwise gradients are scaled by the resulting factor, as
/// torch::nn::utils::clip_grad_norm_ does.
SMP_API double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                               double norm_type = 2, bool error_if_nonfinite = false);

/// Limits each element of the gradients of parameters to [-clip_value, clip_value], on whatever
/// rank it is. Not collective. Throws `UsageError` as `grad_norm`.
SMP_API void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);

/// The same for all parameters of a model.
SMP_API at::Tensor grad_norm(const ModelCore& model, double norm_type = 2);
SMP_API double clip_grad_norm_(const ModelCore& model, double max_norm, double norm_type = 2,
                               bool error_if_nonfinite = false);
SMP_API void clip_grad_value_(const ModelCore& model, double clip_value);

/// None of these compiles: they name the argument to pass instead of a plain module.
template <class... Arguments, class = detail::IfPlain<Arguments...>>
at::Tensor grad_norm(const Arguments&...) {
  detail::refuse_plain_between_steps<Arguments...>();
  return {};
}
template <class... Arguments, class = detail::IfPlain<Arguments...>>
double clip_grad_norm_(const Arguments&...) {
  detail::refuse_plain_between_steps<Arguments...>();
  return 0;
}
template <class... Arguments, class = detail::IfPlain<Arguments...>>
void clip_grad_value_(const Arguments&...) {
  detail::refuse_plain_between_steps<Arguments...>();
}

}  // namespace smp
