// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/model.h"
#include "runtime/runtime.h"
#include "runtime/save/copy_holders.h"
#include "runtime/update/optimizer.h"

namespace smp::runtime {

/// What this start of the job is told of those before, the same on all ranks: by those that know
/// the most, since a host that is new to the job knows nothing. Collective over the world.
/// Internal.
std::optional<core::Restart> agree_on_restart(comm::Communicator& world);

/// Who keeps copies; null if the configuration wants none. Throws a `ConfigError` on all ranks if
/// there is no folder for them. Collective over the world. Internal.
std::shared_ptr<const CopyHolders> find_copy_holders(const Config& config,
                                                     comm::Communicator& world);

/// Notes again what a rank's notes have lost, as they have with their host. Internal.
void note_what_was_before(const Runtime& runtime);

/// As `smp::keep_copy`: a checkpoint in the job's folder, completed on a thread of its own.
/// Internal.
void keep_copy(Runtime& runtime, const Model& model, Optimizer& optimizer,
               const std::string& user_content);

/// What a job that was started again may go on from, the newest last. A copy that several holders
/// have together is whole in each of them then. Collective over the world. Internal.
std::vector<std::string> checkpoints_before(Runtime& runtime);

}  // namespace smp::runtime
