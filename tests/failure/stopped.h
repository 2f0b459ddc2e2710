// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "smp/group.h"
#include "smp/objects.h"

/// Ranks that are processes, seen from outside.
namespace smp::testing {

/// The system's record of a process.
struct ProcessState {
  char letter = ' ';
  int64_t ticks = 0;  ///< ticks of the clock for which it has computed
};

inline ProcessState state_of(int process) {
  std::ifstream in("/proc/" + std::to_string(process) + "/stat");
  ProcessState result;
  std::string skipped;
  in >> skipped >> skipped >> result.letter;
  for (int i = 4; i < 14; ++i) in >> skipped;
  in >> result.ticks;
  return result;
}

inline void sleep_until(const std::function<bool()>& holds) {
  while (!holds()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

/// The processes of all ranks, which tell each other.
inline std::vector<int> processes_of_ranks() {
  return allgather(static_cast<int>(getpid()), CommGroup::kWorld);
}

/// Stops one rank. The others return when it has, so that all that they wait for is that one.
inline void stop_one(int stopped) {
  const int process = processes_of_ranks().at(static_cast<size_t>(stopped));
  if (rank() == stopped) {
    kill(process, SIGSTOP);
  } else {
    sleep_until([&] { return state_of(process).letter == 'T'; });
  }
}

}  // namespace smp::testing
