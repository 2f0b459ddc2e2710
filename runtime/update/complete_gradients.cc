// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/complete_gradients.h"

#include "core/check.h"
#include "runtime/parameters/dividing.h"
#include "runtime/runtime.h"

namespace smp::runtime {

void begin_use_of_gradients(const std::string& call) {
  SMP_CHECK_WITH(UsageError, !Runtime::exists() || !Runtime::get().current_step.is_running, call,
                 " was called inside a step function. Gradients are complete when the step has "
                 "returned: call it after the step");
  if (Runtime::exists()) take_back_wholes(Runtime::get());
}

}  // namespace smp::runtime
