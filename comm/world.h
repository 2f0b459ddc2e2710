// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include "comm/communicator.h"
#include "comm/world_hosts.h"

namespace smp::comm {

/// The launcher of this process, found in its environment: mpirun; else torchrun, or a program that
/// sets its variables; else srun with PMIx or PMI-2; else none.
enum class Launcher { kMpirun, kTorchrun, kSrun, kNone };
Launcher launcher();

/// The world of this job: all processes that mpirun or srun has started (see make_mpi_world), those
/// of torchrun (see make_torchrun_world), or this process alone. Collective at the first call;
/// later calls return the same world. `timeout` is how long the processes wait for each other
/// (those of mpirun and srun five minutes at least), and `port` where those of torchrun do, unless
/// it is 0.
CommunicatorPtr make_world(std::chrono::milliseconds timeout = std::chrono::seconds(300),
                           int port = 0);

/// Ends the world that make_world started; collective, see finalize_mpi and
/// finalize_torchrun_world.
void finalize_world();

/// True when some rank of the job has called abort(); the process must then end with a non-zero
/// status. Always false for a world of one.
bool world_aborted();

/// Starts the world, as make_world does, if it has not started.
WorldHosts world_hosts();

}  // namespace smp::comm
