// SPDX-License-Identifier: Apache-2.0
// The view of a job's ranks when rank 1 fails; run and checked by process_failure_test.sh.
// usage: abort_program wait|compute|channel|finalize|kill

#include <ATen/ops/zeros.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <string>
#include <thread>

#include "comm/world.h"
#include "core/check.h"
#include "tests/comm/marks.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFailsAfter{300};

void fail(const CommunicatorPtr& world, const std::string& mode) {
  std::this_thread::sleep_for(kFailsAfter);
  if (mode == "kill") {
    std::raise(SIGKILL);
  }
  world->abort("disk full");
  testing::wait_for_marks({0, 2});  // a launcher ends the others when this one ends
}

// Channels from rank 1 to the others.
Channels open_channels(const CommunicatorPtr& world) {
  constexpr int64_t kBytes = 8;
  if (world->rank() == 1) return world->open_channels({{0, 5, kBytes}, {2, 5, kBytes}}, {});
  return world->open_channels({}, {{1, 5, kBytes}});
}

void communicate(const CommunicatorPtr& world, const std::string& mode, const Channels& channels) {
  if (mode == "finalize") {
    finalize_world();
    return;
  }
  if (mode == "compute") {
    std::this_thread::sleep_for(2 * kFailsAfter);
  }
  if (mode == "channel") {
    channels.receivers[0]->receive();
  }
  world->recv(at::zeros({2}), 1, 5);
}

int run(const std::string& mode) {
  const CommunicatorPtr world = make_world();
  const Channels channels = open_channels(world);
  if (world->rank() == 1) {
    fail(world, mode);
    return 1;
  }
  std::string seen = "nothing";
  try {
    communicate(world, mode, channels);
  } catch (const CommError& e) {
    seen = e.what();
  }
  std::printf("rank %d saw [%s] aborted %d\n", world->rank(), seen.c_str(), world_aborted());
  std::fflush(stdout);
  testing::leave_mark(world->rank());
  testing::wait_for_marks({0, 2});  // it ends the other one when this one ends, too
  finalize_world();                 // must not hang
  return world_aborted() ? 1 : 0;
}

}  // namespace
}  // namespace smp::comm

int main(int argc, char** argv) { return argc == 2 ? smp::comm::run(argv[1]) : 2; }
