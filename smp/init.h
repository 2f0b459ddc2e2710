// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <functional>

#include "smp/config.h"
#include "smp/export.h"

namespace smp {

/// Sets up this rank: reads the configuration (the environment variable SM_HP_MP_PARAMETERS wins
/// over a file, a file over the program), joins the other ranks and forms the groups. The first
/// call of a program; collective. Under mpirun, srun or torchrun the ranks are the processes
/// (docs/launching.md); otherwise the process is a world of one. Throws `ConfigError`, and
/// `UsageError` at a second call.
SMP_API void init(const Config& config = Config());

/// Ends the work that `init` began; collective. Without it, that happens at the end of the program.
/// A program that ends with a non-zero status without it ends the other ranks too. On a device that
/// end comes before static objects and functions of `atexit` that were made between `init` and the
/// first step; their calls of smp are refused. Throws
/// `TimeoutError` when others have not come to their end within twice `timeout_seconds`, and
/// `CommError` when one makes another call.
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

/// Has this rank compute on GPU `index`, and makes it the current one of this thread: usually
/// `smp::set_device(smp::local_rank())` after `init`. The first step moves the rank's tensors of
/// the models there, and each step the inputs that it reads; both may be made on the CPU. Ranks may
/// share a GPU. On a machine without GPUs there is nothing to choose and this returns; before
/// `init` it only makes the GPU the current one. Throws `UsageError` for another GPU after the
/// first step. docs/cuda.md
SMP_API void set_device(int index);

/// Where this rank computes: the GPU that `set_device` chose, else the device that its models were
/// made on or moved to; the CPU while there are none. Throws `UsageError` before `init`.
SMP_API c10::Device device();

}  // namespace smp
