// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tools/launch.h"

namespace smp::tools {

/// How a command ended.
struct ProcessResult {
  /// Its exit status, or 128 + the signal that ended it.
  int exit_status = 0;
  /// The last signal that was sent on to it; 0 for none.
  int forwarded_signal = 0;
};

/// Runs the command, found in PATH, and waits for it. SIGINT, SIGTERM and SIGHUP that this process
/// receives meanwhile are sent on to it, except those of the terminal, which the command receives
/// as well. Must be called from the only thread of the process. Throws `smp::Error` when the
/// command cannot be started.
ProcessResult run_process(const LaunchCommand& command);

}  // namespace smp::tools
