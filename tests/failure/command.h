#pragma once

#include <sys/wait.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <string>

namespace smp::testing {

/// What a command did.
struct Outcome {
  int status;
  double seconds;
  std::string output;
};

/// Runs a shell command to its end.
inline Outcome run_command(const std::string& command) {
  const auto start = std::chrono::steady_clock::now();
  FILE* pipe = popen(command.c_str(), "r");
  Outcome outcome;
  std::array<char, 4096> buffer;
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) outcome.output += buffer.data();
  const int status = pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  const auto end = std::chrono::steady_clock::now();
  outcome.seconds = std::chrono::duration<double>(end - start).count();
  return outcome;
}

}  // namespace smp::testing
