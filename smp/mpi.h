// SPDX-License-Identifier: Apache-2.0
#pragma once

// Needs MPI's header, so it is no part of smp/smp.h.
#include <mpi.h>

#include "smp/config.h"
#include "smp/detail/session.h"

namespace smp {

/// Sets up this rank, as `init(config)`, for programs that have an MPI of their own: the ranks are
/// the processes of `communicator`, which may be a part of all. Collective over it; blocks until
/// all have come. MPI has been started by the program, with any thread level, and is ended by it,
/// after `shutdown`; the call is made on a thread that may call MPI. The ranks meet by one
/// collective on a copy of the communicator; then no MPI is used, and neither are MPI_COMM_WORLD,
/// mpirun's environment variables or the process's handlers of exceptions and of its exit.
///
/// After `shutdown` there may be another session, with these or other ranks; models, optimizers and
/// step functions of the one before are of no use in it. An error of one rank does not end its
/// process: the program calls `shutdown`, and the others' next calls throw `CommError`.
///
/// Throws `ConfigError` for the configuration, `UsageError` for a handle that is none, on a
/// thread that may not call MPI and while there is another session, and `CommError` on all ranks
/// when one of them has thrown or cannot be reached.
inline void init(const Config& config, MPI_Comm communicator) {
  detail::begin_session(config, MPI_Comm_c2f(communicator));
}

}  // namespace smp
