// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/world_hosts.h"

namespace smp::comm {

/// True when this process was started by mpirun.
bool under_mpirun();

/// The world of all processes of the MPI job (one process without mpirun). Initialises MPI at the
/// first call; later calls return a communicator of the same world. Collective at the first call.
/// Throws `CommError` when MPI does not support MPI_THREAD_MULTIPLE or fails. When the others have
/// not come within `timeout`, it says so and ends the process, since MPI's wait has no other end.
CommunicatorPtr make_mpi_world(std::chrono::milliseconds timeout = std::chrono::seconds(300));

/// Ends MPI. Collective: waits until all ranks have called it; throws the `CommError` of which
/// final_barrier tells. When the job
/// was aborted, before or meanwhile, it returns at once and leaves MPI unfinalised (MPI_Finalize
/// would hang); the process must then end with a non-zero status, see `mpi_aborted()`. Where MPI
/// does not end within the world's time-out, it says so and ends the process. Does nothing
/// when MPI was not initialised here or has been finalised. No communicator may be used after it.
void finalize_mpi();

/// True when some rank has called abort() on a communicator of the MPI job.
bool mpi_aborted();

/// After make_mpi_world().
const WorldHosts& mpi_hosts();

}  // namespace smp::comm
