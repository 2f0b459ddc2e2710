// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "runtime/runtime.h"

namespace smp::runtime {

/// Whether this rank notes how far the job has come: rank 0, and where the notes lie with the
/// copies, a rank of each holder. Internal.
bool notes_progress(const Runtime& runtime);

/// Notes for the launcher how many steps are done. Internal.
void note_steps(const Runtime& runtime);

/// Called when a step of training has been counted. Notes it, and after a restart
/// says in the first such step where the run goes on and how much of it is trained again. Internal.
void note_training_step(Runtime& runtime);

}  // namespace smp::runtime
