// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "runtime/model.h"
#include "runtime/runtime.h"
#include "runtime/update/optimizer.h"

namespace smp::runtime {

/// Throws a `ConfigError` on all ranks if the configuration wants a copy kept and there is no
/// folder for it, or ranks on other hosts have another one. Collective over the world; `hosts[r]`
/// is the host of rank r. Internal.
void check_recovery_folder(const Config& config, comm::Communicator& world,
                           const std::vector<std::string>& hosts);

/// As `smp::keep_copy`: a checkpoint in the job's folder, completed on a thread of its own.
/// Internal.
void keep_copy(Runtime& runtime, const Model& model, Optimizer& optimizer,
               const std::string& user_content);

/// What a job that was started again may go on from, the newest last: rank 0's view, on all ranks.
/// Collective over the world. Internal.
std::vector<std::string> checkpoints_before(const Runtime& runtime);

}  // namespace smp::runtime
