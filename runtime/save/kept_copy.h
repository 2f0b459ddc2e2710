// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/runtime.h"
#include "runtime/save/background_save.h"
#include "runtime/save/copy_holders.h"
#include "smp/checkpoint_parts.h"

namespace smp::runtime {

/// The ranks that keep copies; null if the configuration wants none. Throws a `ConfigError` on all
/// ranks if there is no folder for them. Collective over the world. Internal.
std::shared_ptr<const CopyHolders> find_copy_holders(const Config& config,
                                                     comm::Communicator& world);

/// Notes again the entries that a rank's notes have lost, as they do with their host. Internal.
void note_what_was_before(const Job& job, const CheckpointContext& context);

/// Does the work of `smp::keep_copy`: a checkpoint in the job's folder, completed on a thread of
/// its own. Internal.
void keep_copy(Runtime& runtime, const CheckpointParts& parts, const std::string& user_content);

/// The checkpoints from which a restarted job may go on, the newest last. A copy that several
/// holders have together is whole in each of them then. Collective over the world. Internal.
std::vector<std::string> checkpoints_before(const Job& job, CheckpointContext& context);

}  // namespace smp::runtime
