#pragma once

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace smp::comm {

/// The world of this job: all processes under mpirun (see make_mpi_world), otherwise this process
/// alone, without MPI. Collective at the first call; later calls return the same world.
CommunicatorPtr make_world();

/// Ends what make_world started; collective under mpirun, see finalize_mpi.
void finalize_world();

/// True when some rank of an MPI job has called abort(); the process must then end with a non-zero
/// status. Always false for a world of one.
bool world_aborted();

/// How the ranks of the world lie on hosts.
struct WorldHosts {
  int local_rank;                  ///< This rank's place among those of its host.
  int local_size;                  ///< The ranks of this host.
  std::vector<std::string> names;  ///< The host name of each world rank.
};

/// Starts the world, as make_world does, if it has not started.
WorldHosts world_hosts();

}  // namespace smp::comm
