// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "runtime/runtime.h"
#include "runtime/save/background_save.h"

namespace smp::runtime {

/// Notes for the launcher how many steps are done. Internal.
void note_steps(const CheckpointContext& context, const Progress& progress);

/// Called when a step of training has been counted. Notes it, and after a restart
/// says in the first such step where the run goes on and how much of it is trained again. Internal.
void note_training_step(Runtime& runtime);

}  // namespace smp::runtime
