// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <string>

namespace smp::testing {

/// The result of a command.
struct Outcome {
  int status = 0;  ///< the exit status, or 128 and the signal that ended it
  double seconds = 0;
  std::string output;
};

/// Before a command that starts a job: its ranks end by mpirun's SIGTERM, and mpirun does not let a
/// second pass before it makes sure of that.
constexpr const char* kNoFarewell = " OMPI_MCA_odls_base_sigkill_timeout=0 ";

/// Runs a shell command to its end. Ends with "2>&1" where the output shall hold errors, too.
inline Outcome run_command(const std::string& command) {
  const auto start = std::chrono::steady_clock::now();
  FILE* pipe = popen(command.c_str(), "r");
  Outcome outcome;
  char buffer[4096];
  size_t count = 0;
  while ((count = fread(buffer, 1, sizeof(buffer), pipe)) > 0) outcome.output.append(buffer, count);
  const int status = pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  const auto end = std::chrono::steady_clock::now();
  outcome.seconds = std::chrono::duration<double>(end - start).count();
  return outcome;
}

}  // namespace smp::testing
