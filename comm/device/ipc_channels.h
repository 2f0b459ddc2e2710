// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "comm/channel.h"
#include "comm/communicator.h"
#include "comm/device/ipc.h"
#include "core/refusal.h"

/// Channels between processes of one host, whose elements pass through memory of the sender's
/// device that both have open (comm/split_channel.h).
///
/// The memory is a ring of slots. A sender writes the elements into a slot; the receiver's stream
/// waits until they are there and copies them into memory of its own. The slot is used again when
/// the host's channel has room for the message after next, which tells that the receiver's host has
/// asked for the copy, and on a stream that waits for it. No host waits for a device before the
/// channel ends.
namespace smp::comm {

/// Opens channels as `Communicator::open_channels` does, over those of `host`, whose ranks can
/// share memory of their devices (`why_not_ipc`).
Channels open_ipc_channels(const CommunicatorPtr& host, DeviceIpc& ipc,
                           const std::vector<ChannelSpec>& outgoing,
                           const std::vector<ChannelSpec>& incoming);

/// Why the ranks of a group, each with a device, cannot read each other's memory; nothing if they
/// can: they have tried. Collective: the same on all ranks.
core::Refusal why_not_ipc(Communicator& host, DeviceIpc& ipc, at::Device device);

}  // namespace smp::comm
