// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/status_report.h"

namespace smp::core {

/// The jobs of this user that have ranks on this host, by name: those that can be seen in /proc.
/// Takes a fifth of a second where a rank seems to sleep, to see whether its processor time grows.
std::vector<JobStatus> read_jobs();

/// The job of this thread's rank; nothing without one, or without /proc.
std::optional<JobStatus> read_own_job();

/// Why this thread's rank waits, as far as can be seen from this host.
struct WaitDiagnosis {
  std::string chain;  ///< See `wait_chain`.
  std::optional<StallCause> cause;
};
WaitDiagnosis diagnose_wait();

}  // namespace smp::core
