// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "comm/communicator.h"

namespace smp::comm {

/// Whether this is a build with NCCL (--config=cuda).
bool has_nccl();

/// Which GPU this is, the world over; empty where NCCL cannot be used: in a build without
/// --config=cuda, and for other devices. NCCL needs another GPU on each rank of a group.
std::string nccl_gpu(at::Device device);

/// A communicator for tensors of GPU `device`, over libtorch's own NCCL group; for those of the CPU
/// it is `host`. All tensors are contiguous. Reductions add in rank order, as all communicators do.
/// Messages from one rank to another arrive in the order sent whatever their tags, so receives are
/// to be posted in that order.
///
/// Each channel has an NCCL communicator and a stream of its own. The first bytes of its messages
/// (`ChannelSpec::host_bytes`) go through host memory and tell the receiver that the rest is on its
/// way: the host waits for that message and never for the device.
///
/// Collective over `host`. When the ranks cannot reach each other it throws what libtorch's store
/// and NCCL throw (`c10::DistError`). A transfer that does not end within the time-out ends the
/// process, by libtorch's watchdog: no host waits for it, so none can throw.
CommunicatorPtr make_nccl_communicator(const CommunicatorPtr& host, at::Device device);

}  // namespace smp::comm
