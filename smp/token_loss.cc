// SPDX-License-Identifier: Apache-2.0
#include "smp/token_loss.h"

#include "core/check.h"
#include "core/status.h"
#include "runtime/model.h"
#include "runtime/runtime.h"
#include "smp/group.h"

namespace smp {
namespace {

using runtime::Runtime;

/// The ranks that are given batches of their own.
CommGroup batch_group(const Config& config) {
  return config.prescaled_batch() ? CommGroup::kRdp : CommGroup::kDp;
}

}  // namespace

at::Tensor count_tokens(const at::Tensor& counted) {
  const core::CallScope here("smp::count_tokens");
  const at::NoGradGuard no_grad;
  const at::Tensor total = group(batch_group(Runtime::get().config())).all_reduce(counted.sum());
  return total.masked_fill(total.eq(0), 1);
}

at::Tensor mean_over_tokens(const at::Tensor& sum, const at::Tensor& tokens) {
  const Runtime& runtime = Runtime::get();
  for (const auto& model : runtime.models()) {
    SMP_CHECK_WITH(UsageError, model->options().average_grads_across_microbatches(),
                   "smp::mean_over_tokens: the gradients of a model are summed over microbatches, "
                   "not averaged. Leave out "
                   "ModelOptions().average_grads_across_microbatches(false), or divide the loss by "
                   "the number of tokens yourself");
  }
  const auto& step = runtime.current_step;
  const int64_t of_replica = step.is_running ? step.microbatches : runtime.batches();
  return sum * (of_replica * runtime.replicas()->size()) / tokens;
}

}  // namespace smp
