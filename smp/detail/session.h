// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "smp/config.h"
#include "smp/export.h"

namespace smp::detail {

/// Begins a session of all threads of this process: as `smp::init`, but on the ranks of a
/// communicator of the program's MPI, given by its Fortran handle. Collective over it. The process
/// keeps its handlers of uncaught exceptions and of its exit.
SMP_API void begin_session(const Config& config, int64_t communicator);

}  // namespace smp::detail
