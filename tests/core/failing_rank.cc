// A program for smprun_test: writes its process id to FOLDER/pid.RANK, then does what MODE says.
// The ranks that do not fail wait, so that only the launcher can end them.

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>

#include "smp/core/env.h"
#include "smp/core/failure.h"

namespace {

constexpr std::chrono::seconds kLongerThanTheTest{60};

void fail(int rank, const std::string& mode) {
  if (mode == "record" && rank == 1) {
    smp::record_failure(rank, "the loss of microbatch 3 is not finite");
    std::exit(3);
  }
  if (mode == "record") {  // a consequence, recorded later
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    smp::record_failure(rank, "rank 1 is gone");
  }
  if (mode == "crash" && rank == 1) std::raise(SIGSEGV);
}

}  // namespace

int main(int, char** argv) {
  const std::string folder = argv[1];
  const std::string mode = argv[2];
  const int rank = std::stoi(smp::env("OMPI_COMM_WORLD_RANK").value());
  std::ofstream(folder + "/pid." + std::to_string(rank)) << getpid() << std::flush;
  if (mode == "pass") {
    std::cout << smp::env("SM_HP_MP_PARAMETERS").value_or("none") << std::endl;
    return 0;
  }
  fail(rank, mode);
  std::this_thread::sleep_for(kLongerThanTheTest);
}
