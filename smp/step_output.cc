// SPDX-License-Identifier: Apache-2.0
#include "smp/step_output.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include "core/check.h"
#include "core/status.h"

namespace smp {

const std::vector<at::Tensor>& StepOutput::defined() const {
  SMP_CHECK_WITH(UsageError, !outputs_.empty(), "a StepOutput without outputs was reduced");
  SMP_CHECK_WITH(
      UsageError, outputs_[0].defined(),
      "a StepOutput is not on this rank: its step function was made with "
      "StepOptions().share_outputs(false), so only the rank that computes it has it. Ask "
      "outputs()[0].defined() before, or share outputs");
  return outputs_;
}

at::Tensor StepOutput::reduce_sum() const {
  defined();
  const bool integral = at::isIntegralType(outputs_[0].scalar_type(), /*includeBool=*/true);
  at::Tensor sum = integral ? outputs_[0].to(at::kLong, /*non_blocking=*/false, /*copy=*/true)
                            : outputs_[0].clone();
  for (size_t m = 1; m < outputs_.size(); ++m) sum.add_(outputs_[m]);
  return sum;
}

at::Tensor StepOutput::reduce_mean() const {
  at::Tensor sum = reduce_sum();
  return sum.is_floating_point() || sum.is_complex()
             ? sum.div_(static_cast<double>(outputs_.size()))
             : sum.div(static_cast<double>(outputs_.size()));
}

at::Tensor StepOutput::reduce_mean(const Group& group) const {
  const core::CallScope here("StepOutput::reduce_mean");
  return StepOutput(group.all_gather(stack()).flatten(0, 1).unbind()).reduce_mean();
}

at::Tensor StepOutput::concat() const {
  SMP_CHECK_WITH(
      UsageError, defined()[0].dim() > 0,
      "StepOutput::concat needs tensors with a batch axis; these have none. Use stack()");
  return at::cat(outputs_, 0);
}

at::Tensor StepOutput::stack() const { return at::stack(defined(), 0); }

}  // namespace smp
