// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "tools/launch.h"

namespace smp::tools {

/// How a command ended.
struct ProcessResult {
  /// Its exit status, or 128 + the signal that ended it, or 128 + the signal that was sent on to
  /// it.
  int exit_status = 0;
  /// The last signal that was sent on to it; 0 for none.
  int forwarded_signal = 0;
  /// The last that it wrote to its standard error, some KiB.
  std::string error_tail;
};

/// Throws `smp::Error` unless `program`, a path or a name in PATH, can be executed on this host.
void check_program(const std::string& program);

/// Runs the command, found in PATH, and waits for it. SIGINT, SIGTERM and SIGHUP that this process
/// receives meanwhile are sent on to it, except those of the terminal, which the command receives
/// as well. What it writes to its standard error is passed on to that of this process. Must be
/// called from the only thread of the process. Throws `smp::Error` when the command cannot be
/// started.
ProcessResult run_process(const LaunchCommand& command);

}  // namespace smp::tools
