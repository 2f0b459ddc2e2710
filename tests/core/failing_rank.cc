// SPDX-License-Identifier: Apache-2.0
// A program for smprun_test: writes its process id to FOLDER/pid.RANK, then acts by MODE. The ranks
// that do not fail wait, so that only the launcher can end them.

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>

#include "core/env.h"
#include "core/failure.h"

namespace {

constexpr std::chrono::seconds kLongerThanTheTest{60};

void wait_for(const std::string& file) {
  while (!std::ifstream(file)) std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

void fail(int rank, const std::string& folder, const std::string& mode) {
  if (rank == 1) wait_for(folder + "/pid.0");  // or the launcher might end rank 0 unseen
  if (mode == "record" && rank == 1) {
    smp::core::record_failure(rank, "the loss of microbatch 3 is not finite");
    std::exit(3);
  }
  if (mode == "record") {
    wait_for(smp::core::env(smp::core::kFailureDirVariable).value() + "/1");
    smp::core::record_failure(rank, "a consequence: rank 1 is gone");
  }
  if (mode == "crash" && rank == 1) {
    std::signal(SIGSEGV, SIG_DFL);  // a sanitizer would report and exit instead
    std::raise(SIGSEGV);
  }
}

}  // namespace

int main(int, char** argv) {
  const std::string folder = argv[1];
  const std::string mode = argv[2];
  const int rank = std::stoi(smp::core::env("OMPI_COMM_WORLD_RANK").value());
  std::ofstream(folder + "/pid." + std::to_string(rank)) << getpid() << std::flush;
  if (mode == "pass") {
    std::cout << smp::core::env("SM_HP_MP_PARAMETERS").value_or("none") << std::endl;
    return 0;
  }
  fail(rank, folder, mode);
  std::this_thread::sleep_for(kLongerThanTheTest);
}
