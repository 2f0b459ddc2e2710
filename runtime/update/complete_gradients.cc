// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/complete_gradients.h"

#include "core/check.h"
#include "runtime/model.h"
#include "runtime/parameters/dividing.h"
#include "runtime/runtime.h"

namespace smp::runtime {

void begin_use_of_gradients(const std::string& call) {
  SMP_CHECK_WITH(UsageError, !Runtime::exists() || !Runtime::get().current_step.is_running, call,
                 " was called inside a step function. Gradients are complete when the step has "
                 "returned: call it after the step");
  if (Runtime::exists()) OwnUse parameters(Runtime::get());
}

void zero_grad(const Model& model) {
  Runtime& runtime = model.runtime();
  const OwnUse parameters = begin_outside_step(runtime, "zero_grad");
  model.module_ptr()->zero_grad();
  for (const at::Tensor& parameter : model.parameters()) {
    const auto* entry = runtime.table().find(parameter);
    // Drops the piece's with it.
    if (entry != nullptr && entry->piece) entry->piece->has_gradient();
  }
}

void check_nothing_adds_up(const CurrentStep& step, const std::string& call) {
  SMP_CHECK_WITH(
      UsageError, step.adding_up == nullptr, call,
      " was called while sums of gradients wait for later steps "
      "(backward_passes_per_step), which are in no checkpoint. Call it after the last of "
      "the steps that add up");
}

}  // namespace smp::runtime
