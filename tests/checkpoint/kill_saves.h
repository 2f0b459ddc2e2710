// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace smp::testing {

/// How many saves were killed, and their leftovers.
struct KillCount {
  int at_calls = 0;            ///< killed at a file call, each as likely as any other
  int at_times = 0;            ///< killed after a random time
  int finished = 0;            ///< were done before they were killed
  int previous = 0, next = 0;  ///< the checkpoint that was replaced was found as before, as after
  int64_t calls = 0;           ///< file calls of a round of saves
  std::vector<std::string> problems;  ///< the files that were not whole, in words
};

/// Starts `rounds` processes, one after the other, that train on two ranks and save into `folder`:
/// over an earlier checkpoint, as a new one that makes the oldest go, and as one file in the
/// background. Kills each with SIGKILL at a random moment, and then checks, with all hashes, that
/// every checkpoint that had been completed is there, whole, and of one time. Call it with no other
/// thread running.
KillCount kill_saves(const std::string& folder, int rounds, uint64_t seed);

}  // namespace smp::testing
