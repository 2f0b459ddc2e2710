// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

/// Lets the processes of one host wait for each other where they cannot communicate any more: by
/// files in the folder that the environment names as SMP_TEST_MARKS.
namespace smp::comm::testing {

inline std::string mark_of(int rank) {
  const char* folder = std::getenv("SMP_TEST_MARKS");
  return std::string(folder == nullptr ? "." : folder) + "/rank" + std::to_string(rank);
}

inline void leave_mark(int rank) { std::ofstream file(mark_of(rank)); }

/// Waits until the ranks have left their marks. Not for ever, so that a rank which never does is
/// missed by the reader of the ranks' output.
inline void wait_for_marks(const std::vector<int>& ranks) {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (const int rank : ranks) {
    while (!std::filesystem::exists(mark_of(rank)) && std::chrono::steady_clock::now() < give_up) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

}  // namespace smp::comm::testing
