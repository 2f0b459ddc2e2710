// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>

#include "comm/communicator.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace smp::comm {

/// A process group for libtorch's own distributed code (`c10d::Reducer` and the like) over a
/// communicator, for tensors of the CPU and of the machine's accelerator; its backend, which
/// backend.h describes, is called "smp". Collective over `group`, which is not disturbed: the
/// process group talks in a split of its own.
///
/// Include <torch/csrc/distributed/c10d/ProcessGroup.hpp> to use the result.
c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const CommunicatorPtr& group);

/// A process group of the backend "smddp", as `torch.distributed.init_process_group` makes one in
/// Python; see `make_smddp_backend`.
c10::intrusive_ptr<c10d::ProcessGroup> make_smddp_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout);

/// The same of the processes that torchrun has started, or that have its variables (RANK,
/// WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Throws as `open_torchrun_store`. Collective.
c10::intrusive_ptr<c10d::ProcessGroup> make_smddp_process_group(
    std::chrono::milliseconds timeout = std::chrono::seconds(300));

}  // namespace smp::comm
