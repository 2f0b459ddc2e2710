// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

namespace smp::core {

// A job that is asked to stop ends by itself, where it can go on later: for `"preempt_seconds"`.

/// From now on SIGTERM asks this process to stop instead of ending it. `grace` after the first one
/// it ends it all the same. In a process that this one forks, SIGTERM has its default effect.
void take_stop_requests(std::chrono::nanoseconds grace);

/// Whether this process was asked: by SIGTERM, or, where the environment names a folder
/// `SMP_FAILURE_DIR`, by `ask_to_stop`.
bool stop_is_requested();

/// Does the same as SIGTERM: for ranks that are threads.
void set_stop_requested(bool requested);

/// Asks the ranks that see the launcher's folder to stop. False when that cannot be written there.
bool ask_to_stop(const std::string& directory);

/// Notes for the launcher that all ranks know that they shall stop.
void note_stopping() noexcept;
/// Whether that was noted in `directory`.
bool is_stopping(const std::string& directory);

}  // namespace smp::core
