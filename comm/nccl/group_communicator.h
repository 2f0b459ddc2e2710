// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include "comm/communicator.h"
#include "comm/nccl/group_pool.h"

namespace smp::comm {

/// A communicator for tensors of `device` over groups that `make` makes; for those of the CPU it is
/// `host`. All tensors are contiguous.
///
/// Reductions add in rank order, with the host's bits: slices of all ranks go to the rank that adds
/// them, and the sums to those that want them. With `fast_reductions` of the host's
/// `device_transport()` sums, averages and products are the group's own, where it has the type. For
/// tensors of S bytes on n ranks each rank sends, exact or fast: all_reduce 2 (n-1)/n S,
/// reduce_scatter (n-1)/n S.
///
/// Between ranks that are threads of one process, channels are the host's (comm/hand_over.h).
/// Otherwise each port of a channel has a group, and so a stream, of its own. The first bytes of a
/// message (`ChannelSpec::host_bytes`) go through host memory and tell the receiver that the rest
/// is on its way: the host waits for that message and never for the device. Messages outside
/// channels go through host memory, so that tags and the order of receives are up to the program.
CommunicatorPtr make_group_communicator(const CommunicatorPtr& host, at::Device device,
                                        MakeDeviceGroup make);

}  // namespace smp::comm
