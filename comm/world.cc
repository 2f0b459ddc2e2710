// SPDX-License-Identifier: Apache-2.0
#include "comm/world.h"

#include <algorithm>

#include "comm/mpi/mpi_communicator.h"
#include "comm/store/store_communicator.h"
#include "comm/threads/thread_world.h"
#include "core/check.h"
#include "core/env.h"
#include "core/host.h"
#include "core/libtorch.h"
#include "core/vector_math.h"

namespace smp::comm {
namespace {

// Ranks that a launcher of MPI starts may come one after the other; a short time-out is meant for
// those that work.
constexpr std::chrono::seconds kStart{300};

/// Tasks of srun that cannot find each other would each train alone. (SLURM_NTASKS is set for a
/// batch script, too, which is one process.)
void check_alone() {
  const auto tasks = core::env("SLURM_STEP_NUM_TASKS");
  SMP_CHECK_WITH(
      UsageError, !tasks || *tasks == "1", "srun started ", *tasks,
      " tasks (SLURM_STEP_NUM_TASKS), of which this is one, and gave them neither "
      "PMIX_RANK nor PMI_RANK, by which they would find each other. Start them with srun "
      "--mpi=pmix, or by smprun or mpirun within the job; for programs of one rank each, "
      "unset SLURM_STEP_NUM_TASKS");
}

/// Half of torchrun's variables: a process of several, which would train alone.
void check_variables() {
  const auto rank = core::env("RANK"), size = core::env("WORLD_SIZE");
  const bool is_whole = rank.has_value() == size.has_value() || size == "1";
  const char* const set = rank ? "RANK" : "WORLD_SIZE";
  SMP_CHECK_WITH(UsageError, is_whole, "the environment variable ", set, " is ",
                 *(rank ? rank : size), ", and ", rank ? "WORLD_SIZE" : "RANK",
                 " is not set. Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process "
                 "of a job, as torchrun does, or unset them all for a program of one rank");
}

CommunicatorPtr world_of_one() {
  static const CommunicatorPtr world = make_thread_world(1).front();
  return world;
}

}  // namespace

Launcher launcher() {
  if (under_mpirun()) {
    return Launcher::kMpirun;
  }
  // Before srun, which may have started torchrun.
  if (under_torchrun()) {
    return Launcher::kTorchrun;
  }
  return core::env("PMIX_RANK") || core::env("PMI_RANK") ? Launcher::kSrun : Launcher::kNone;
}

CommunicatorPtr make_world(std::chrono::milliseconds timeout, int port) {
  core::check_libtorch();
  core::prepare_vector_math();
  switch (launcher()) {
    case Launcher::kMpirun:
    case Launcher::kSrun:
      return make_mpi_world(std::max<std::chrono::milliseconds>(timeout, kStart));
    case Launcher::kTorchrun:
      return make_torchrun_world(timeout, port);
    case Launcher::kNone:
      check_alone();
      check_variables();
      break;
  }
  return world_of_one();
}

void finalize_world() {
  finalize_mpi();
  finalize_torchrun_world();
}

bool world_aborted() { return mpi_aborted() || torchrun_world_aborted(); }

WorldHosts world_hosts() {
  make_world();
  switch (launcher()) {
    case Launcher::kMpirun:
    case Launcher::kSrun:
      return mpi_hosts();
    case Launcher::kTorchrun:
      return torchrun_hosts();
    case Launcher::kNone:
      break;
  }
  return {0, 1, {core::host_name()}};
}

}  // namespace smp::comm
