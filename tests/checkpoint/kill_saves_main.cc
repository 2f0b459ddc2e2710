// SPDX-License-Identifier: Apache-2.0
// bazel run //tests/checkpoint:kill_saves -- [ROUNDS [SEED [FOLDER]]]
//
// Kills ROUNDS (200) processes while they save, and checks after each the content of FOLDER (by
// default one in the folder for temporary files). Exits with 1 if anything is not whole.

#include <ATen/Parallel.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/checkpoint/kill_saves.h"

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 200;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const std::string folder =
      argc > 3 ? argv[3] : (std::filesystem::temp_directory_path() / "smp_kill_saves").string();
  const auto count = smp::testing::kill_saves(folder, rounds, seed);
  std::printf(
      "%d kills: %d at one of %ld file calls, %d at a random time (%d saved all before they were "
      "killed)\nthe replaced checkpoint was the new one %d times, the previous one %d times\n"
      "problems: %zu\n",
      count.at_calls + count.at_times, count.at_calls, static_cast<long>(count.calls),
      count.at_times, count.finished, count.next, count.previous, count.problems.size());
  for (const std::string& problem : count.problems) std::printf("  %s\n", problem.c_str());
  return count.problems.empty() ? 0 : 1;
}
