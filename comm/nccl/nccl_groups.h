// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "comm/communicator.h"
#include "comm/nccl/group_pool.h"

namespace smp::comm {

/// Whether this is a build with NCCL (--config=cuda).
bool has_nccl();

/// Which GPU this is, the world over; empty where NCCL cannot be used: in a build without
/// --config=cuda, and for other devices. NCCL needs another GPU on each rank of a group.
std::string nccl_gpu(at::Device device);

/// Makes libtorch's NCCL groups for ranks of `host`, with its time-out. A transfer that does not
/// end within that ends the process, by libtorch's watchdog. Those of ports take few
/// multiprocessors of the GPU, in streams of high priority.
///
/// Collective over `host`. Throws as `make_group_store` does; where the devices cannot reach each
/// other, the groups throw NCCL's errors.
MakeDeviceGroup nccl_groups(const CommunicatorPtr& host);

}  // namespace smp::comm
