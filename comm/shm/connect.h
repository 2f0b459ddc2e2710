// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "comm/channel.h"
#include "comm/communicator.h"
#include "comm/transport.h"

namespace smp::comm {

/// See `Communicator::open_channels`; the specs are valid. For each channel between ranks that
/// share memory, the sender makes the memory and offers it to the receiver in a message of the
/// group. Threads of one process use one mapping. Another process opens the memory by way of /proc,
/// or, if it cannot, asks to have a file descriptor sent through a socket. Where that is impossible
/// too, both ends go on over messages, with a warning.
Channels open_channels(const std::shared_ptr<Transport>& transport,
                       const std::shared_ptr<const GroupState>& group,
                       const CommunicatorPtr& communicator,
                       const std::vector<ChannelSpec>& outgoing,
                       const std::vector<ChannelSpec>& incoming);

}  // namespace smp::comm
