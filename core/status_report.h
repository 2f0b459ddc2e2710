// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/failure.h"

namespace smp::core {

/// The state of a rank's thread, from the kernel.
struct ThreadState {
  enum class Kind {
    kComputes,  ///< It runs, or its processor time grows.
    kSleeps,
    kStopped,  ///< Stopped by a signal or a debugger.
    kBlocked,  ///< In the kernel, where no signal reaches it: a disk, a file system, swapped
               ///< memory.
    kEnded,
  };
  Kind kind = Kind::kComputes;
  std::string in;  ///< The system call in which it sleeps or is blocked; empty where not known.
  int64_t swapped_mib = 0;  ///< Swapped memory of its process.
};

/// A rank of this host as it was a moment ago.
struct RankStatus {
  int rank = 0;
  pid_t process = 0;
  int64_t step = 0;    ///< The step that it is in, or has ended last; 0 before the first.
  std::string action;  ///< "1B0", "receive 0F3", "smp::save", or `kUsersCode`.
  double action_seconds = 0;
  std::vector<int> waits_for;  ///< The first ranks that it waits for; empty if it does not wait.
  int more = 0;                ///< How many others it waits for.
  std::string wait;            ///< The operation of the wait: "all_reduce".
  double wait_seconds = 0;
  double warned_seconds = -1;  ///< Since it has told of a stall; negative: it has not.
  ThreadState state;
  /// The functions that it is in, innermost first; empty where it was not asked, or has not
  /// answered.
  std::vector<std::string> stack;

  bool is_waiting() const;
};

/// The ranks of a job on this host.
struct JobStatus {
  std::string id;    ///< Identity of this job alone.
  std::string name;  ///< Name that users give it.
  std::string program;
  double seconds = 0;              ///< Since it began.
  std::vector<std::string> hosts;  ///< Hosts of all ranks of the world.
  std::vector<RankStatus> ranks;   ///< Ranks of this host, ascending.

  const RankStatus* find(int rank) const;
};

/// The ranks of this host that others wait for and that do not wait themselves, or that wait for
/// each other in a circle.
std::vector<int> causes_of_waits(const JobStatus& job);

/// Where the chain of waits from `rank` ends. Nothing if `rank` does not wait, if ranks wait for
/// each other in a circle, or if the chain leaves this host.
std::optional<StallCause> stall_cause(const JobStatus& job, int rank);

/// The chain of waits from a rank, in one sentence without a stop: "rank 3 waits for 5F2 of rank 1,
/// which has been in 4B4 for 41 s (rank 1: stopped)". Empty if it does not wait.
std::string wait_chain(const JobStatus& job, int rank);

/// The table of a job's ranks, a line each, and below it the longest chain of waits to each cause,
/// with the cause's stack, or those of a circle, if they have said it.
std::string status_text(const JobStatus& job);

}  // namespace smp::core
