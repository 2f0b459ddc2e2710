// SPDX-License-Identifier: Apache-2.0
// Replaces the rest of this folder in a build without MPI.

#include "comm/mpi/caller_ranks.h"
#include "comm/mpi/mpi_communicator.h"
#include "core/check.h"
#include "core/env.h"

namespace smp::comm {

bool under_mpirun() { return core::env("OMPI_COMM_WORLD_SIZE").has_value(); }

CommunicatorPtr make_mpi_world(std::chrono::milliseconds /*timeout*/) {
  core::fail<CommError>(
      "this process was started by mpirun or srun, and smp was built without MPI. Build it with "
      "-DSMP_MPI=ON, or start the processes with torchrun or with RANK, WORLD_SIZE, MASTER_ADDR "
      "and "
      "MASTER_PORT set.");
}

CallerRanks exchange_texts(int64_t /*communicator*/,
                           const std::function<std::string(int rank)>& /*text*/) {
  core::fail<CommError>(
      "a session cannot have the ranks of an MPI communicator, since smp was built without MPI. "
      "Build it with -DSMP_MPI=ON.");
}

void finalize_mpi() {}
bool mpi_aborted() { return false; }

const WorldHosts& mpi_hosts() { SMP_INTERNAL_ASSERT(false, "mpi_hosts in a build without MPI"); }

}  // namespace smp::comm
