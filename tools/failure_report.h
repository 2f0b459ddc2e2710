// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/failure.h"
#include "tools/process.h"

namespace smp::tools {

/// The rank that mpirun says has ended first, and how.
struct EndedRank {
  int rank = 0;
  std::string how;  ///< "was ended by signal 9 (Killed)", "ended with exit status 7"
};

/// The rank that has ended, in mpirun's standard error.
std::optional<EndedRank> ended_rank(const std::string& mpirun_says);

/// The launcher's last words about a job that has failed: a line that names the first cause, after
/// one that quotes who noticed where the rank itself has left no message. `failures` in their
/// order.
///
/// A rank that failed by itself is the cause. Else it is one whose process has ended. Else ranks
/// waited for each other in vain: the chain from the one that gave up first leads to a rank that
/// did not wait, which that one has seen, or which the messages tell.
std::string failure_report(const std::vector<core::Failure>& failures, const ProcessResult& result);

/// The line of a job that a signal to the launcher has stopped: "smprun: stopped by signal 15
/// (Terminated)", and why it was not asked to stop by itself, or did not, if not empty.
std::string stop_report(int signal, const std::string& because = "");

}  // namespace smp::tools
