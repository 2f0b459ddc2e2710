// SPDX-License-Identifier: Apache-2.0
#include "runtime/save/job_notes.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/failure.h"
#include "core/log.h"
#include "core/restart.h"

namespace smp::runtime {
namespace {

void tell(const core::Restart& restart, int64_t from) {
  const int64_t again = std::max<int64_t>(restart.before.steps - from, 0);
  const std::string text =
      c10::str("restart ", restart.number, ": goes on from step ", from, "; ", again,
               again == 1 ? " step is" : " steps are", " trained again");
  const auto& saved = restart.before.checkpoints;
  if (from > 0 || (saved.empty() && !restart.before.kept_steps)) {
    core::log_info(text);
  } else {
    core::log_warning(
        text + ", though there is " +
        (saved.empty() ? "a copy in memory" : "checkpoint \"" + saved.back().path + "\"") +
        ". Call smp::resume_after_restart before the first step");
  }
}

}  // namespace

void note_steps(const CheckpointContext& context, const Progress& progress) {
  if (context.notes_progress()) core::note_steps(progress.training_steps);
}

void note_training_step(Runtime& runtime) {
  Progress& progress = runtime.progress;
  if (runtime.rank() == 0 && !std::exchange(progress.restart_is_told, true)) {
    if (runtime.restart()) tell(*runtime.restart(), progress.training_steps - 1);
  }
  note_steps(*runtime.checkpoint_context, progress);
}

}  // namespace smp::runtime
