// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <string>

#include "core/refusal.h"
#include "tools/launch.h"

namespace smp::tools {

/// How a command ended.
struct ProcessResult {
  /// Its exit status, or 128 + the signal that ended it, or 128 + the signal that was sent on to
  /// it.
  int exit_status = 0;
  /// The last signal that was sent on to it, or that came before it was started; 0 for none.
  int forwarded_signal = 0;
  /// The signal that ended the command itself; 0 for none.
  int own_signal = 0;
  /// Whether it was asked to stop by itself.
  bool asked_to_stop = false;
  /// Why it was ended though no signal said so; empty: it was not.
  std::string ended_because;
  /// The last that it wrote to its standard error, some KiB.
  std::string error_tail;
};

/// The work to do while a command runs.
struct Supervision {
  /// After how long `why_late` is called, once; 0: never.
  std::chrono::seconds start_limit{0};
  /// Why the command has to end.
  std::function<core::Refusal()> why_late;
  /// Called for the first SIGTERM: asks the command to stop by itself, and returns how long that
  /// may take; 0: it cannot, and gets the signal.
  std::function<std::chrono::nanoseconds()> ask_to_stop;
};

/// Throws `smp::Error` unless `program`, a path or a name in PATH, can be executed on this host.
void check_program(const std::string& program);

/// Runs commands, one after the other. From its construction to the end of the process SIGINT,
/// SIGTERM and SIGHUP wait until a command runs or a thread waits for them, so none is lost between
/// two commands; those that were ignored before still are. Processes that a command leaves behind
/// become this one's. One in a process, used by its only thread.
class CommandRunner {
 public:
  CommandRunner();

  /// Runs the command, found in PATH, and waits for it. Signals that this process receives
  /// meanwhile are sent on to it, except those of the terminal, which the command receives as well;
  /// one that came before keeps it from being started. Its standard error is passed on to that of
  /// this process. When it has failed, nothing is left of it: its children end with it, but for
  /// processes with a session of their own or without the first of its variables. Throws
  /// `smp::Error` when the command cannot be started.
  ProcessResult run(const LaunchCommand& command, const Supervision& supervision = {});

  /// The signal that comes within `time`; 0: none.
  int wait(std::chrono::seconds time) const;

 private:
  sigset_t ending_;    // the signals that end a job
  sigset_t children_;  // the signals with which a command starts
};

}  // namespace smp::tools
