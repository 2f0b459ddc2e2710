// SPDX-License-Identifier: Apache-2.0
#include "smp/preemption.h"

#include "core/check.h"
#include "core/log.h"
#include "core/status.h"
#include "core/stop_request.h"
#include "runtime/runtime.h"

namespace smp {
namespace {

using runtime::Runtime;

/// Whether any rank was asked. Collective.
bool agree_on_stop(comm::Communicator& world) {
  const at::Tensor asked = at::full({1}, core::stop_is_requested() ? 1 : 0, at::kInt);
  world.all_reduce(asked, ReduceOp::kMax);
  return *asked.const_data_ptr<int>() != 0;
}

}  // namespace

bool stop_requested() {
  Runtime& runtime = Runtime::get();
  SMP_CHECK_WITH(UsageError, !runtime.current_step.is_running,
                 "smp::stop_requested was called inside a step function; ask between steps");
  runtime::Progress& progress = runtime.progress;
  if (runtime.config().preempt_seconds() == 0 || progress.stop_is_agreed) {
    return progress.stop_is_agreed;
  }
  const core::CallScope here("smp::stop_requested");
  progress.stop_is_agreed = agree_on_stop(*runtime.world());
  if (progress.stop_is_agreed && runtime.rank() == 0) {
    core::note_stopping();
    core::log_info(c10::str("stops after step ", progress.training_steps, ", as it was asked to"));
  }
  return progress.stop_is_agreed;
}

}  // namespace smp
