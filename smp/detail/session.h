// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "smp/config.h"
#include "smp/export.h"

namespace smp::detail {

/// Begins a session: as `smp::init`, but on the ranks of a communicator of the program's MPI, given
/// by its Fortran handle, or, without one, on this process alone, whatever has launched it.
/// Collective over the communicator. `config` is called first; its exception is thrown when the
/// other ranks know that this one cannot begin. The process keeps its handlers of uncaught
/// exceptions and of its exit.
SMP_API void begin_session(const std::function<Config()>& config,
                           const std::optional<int64_t>& communicator);

}  // namespace smp::detail
