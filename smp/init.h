// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "smp/config.h"
#include "smp/export.h"

namespace smp {

/// Sets up this rank: reads the configuration (the environment variable SM_HP_MP_PARAMETERS wins
/// over a file, a file over the program), joins the other ranks and forms the groups. The first
/// call of a program; collective. Under mpirun the ranks are the processes; otherwise the process
/// is a world of one. Throws `ConfigError`, and `UsageError` at a second call.
SMP_API void init(const Config& config = Config());

/// Ends what `init` began; collective. Without it, that happens at the end of the program. A
/// program that ends with a non-zero status without it ends the other ranks too.
SMP_API void shutdown();

/// True between `init` and `shutdown`.
SMP_API bool is_initialized();

/// True inside the step function in the first step of the program, which captures it on data; later
/// runs of the function go over shapes only.
SMP_API bool is_tracing();

/// Plays `ranks` ranks as threads of this process, each with a runtime of its own, and calls
/// `program` on each; for tests and for debugging without mpirun. Rethrows the first exception.
/// Set torch::set_num_threads(1) before, or the ranks compete for cores.
SMP_API void run_as_threads(int ranks, const Config& config, const std::function<void()>& program);

/// Makes GPU `index` the current one of this thread; on a machine without GPUs there is nothing to
/// choose and this returns. Models and inputs are moved by the program: docs/cuda.md.
SMP_API void set_device(int index);

}  // namespace smp
