// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "smp/exit_status.h"
#include "smp/export.h"

namespace smp {

/// Whether the job was asked to stop: by SIGTERM to `smprun`, or to any rank. Asked between steps,
/// at the same place of the program by all ranks:
///
///     if (smp::stop_requested()) {
///       smp::save_checkpoint("runs/gpt", "preempted", model, optimizer);
///       return smp::kPreemptedStatus;
///     }
///
/// The answer is the same on all ranks, and stays true. Collective over the world: a reduction of
/// one number, and nothing, always false, where `"preempt_seconds"` is 0. `smprun` ends a job that
/// has not stopped within as many seconds, and a rank itself without `smprun`. See
/// docs/recovery.md. Throws `UsageError` inside a step function.
SMP_API bool stop_requested();

}  // namespace smp
