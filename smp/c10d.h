// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>

#include "smp/export.h"

namespace c10d {
class Backend;
class ProcessGroup;
class Store;
}  // namespace c10d

/// The backend "smddp" for libtorch's own distributed code, such as `c10d::Reducer`: collectives on
/// the CPU with sums in rank order. docs/data_parallel.md describes it. Neither `smp::init` nor
/// `init_process_group` is needed. To use the results, include
/// <torch/csrc/distributed/c10d/ProcessGroup.hpp> or Backend.hpp.
namespace smp::smddp {

/// A backend of the `size` processes that make it with the same store, this one as `rank`; as
/// `torch.distributed` asks of the creator of a backend. `timeout` is that of meeting and of every
/// later wait; errors call the group `group`. Collective. Throws `TimeoutError` when a process does
/// not come, and `CommError`.
SMP_API c10::intrusive_ptr<c10d::Backend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout = std::chrono::seconds(300),
    const std::string& group = "world");

/// For an interpreter that has given us tensors or callbacks, before its objects end: returns when
/// no thread of this library runs a callback or frees a tensor, which none does from then on.
/// Communication goes on; results without a wait are not delivered any more. Call it without the
/// interpreter's lock.
SMP_API void before_interpreter_ends();

/// A process group of that backend alone.
SMP_API c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout = std::chrono::seconds(300));

/// The same of the processes that torchrun has started, or that have its variables (RANK,
/// WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Throws `UsageError` where one of them is missing.
SMP_API c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(
    std::chrono::milliseconds timeout = std::chrono::seconds(300));

}  // namespace smp::smddp
