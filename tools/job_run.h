// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "core/restart.h"
#include "smp/config.h"
#include "tools/launch.h"
#include "tools/process.h"

namespace smp::tools {

/// Whether no other hosts are named, by the user or by SLURM.
bool is_on_this_host(const LaunchOptions& options, const LaunchContext& context);

/// How one start of the ranks went, as far as is known.
struct JobRun {
  ProcessResult result;
  std::string report;                      ///< report of its failure; empty: it has not failed
  std::optional<core::JobProgress> noted;  ///< how far it came
  Config config;  ///< that was in effect, if rank 0 could note it; else as the launcher knows it
  bool config_is_noted = false;
  int ranks = 0;
  /// Whether it has stopped by itself because it was asked to.
  bool is_preempted = false;

  /// The launcher's last words about a job that is preempted.
  std::string preemption_report() const;
};

/// Starts the ranks and waits for them. `temporary` is where their messages for the launcher lie.
/// Throws `smp::Error` when they cannot be started.
JobRun run_job(const LaunchOptions& options, LaunchContext context, const std::string& temporary,
               CommandRunner& runner);

}  // namespace smp::tools
