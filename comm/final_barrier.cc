// SPDX-License-Identifier: Apache-2.0
#include "comm/final_barrier.h"

#include "core/check.h"
#include "core/failure.h"

namespace smp::comm {
namespace {

void barrier_at_end(Communicator& world) {
  try {
    world.barrier();
  } catch (const core::FailedWait& wait) {
    wait.throw_with(" [at the end of the program, where all ranks wait for each other]");
  }
}

}  // namespace

std::exception_ptr final_barrier(Communicator& world) {
  world.set_timeout(2 * world.timeout());
  try {
    barrier_at_end(world);
  } catch (const CommError& error) {
    core::record_failure(world.rank(), error);  // the launcher asks for whom each rank has waited
    if (world.abort_text().empty()) {
      world.abort(error.what());
      return std::current_exception();
    }
  }
  return nullptr;
}

}  // namespace smp::comm
