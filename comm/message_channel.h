// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "comm/channel.h"
#include "comm/communicator.h"

namespace smp::comm {

// Channels over the point-to-point messages of any communicator: for ranks that share no memory.
// Nothing is agreed; a message of another length is found when it arrives. A receiver says of each
// message that it has received it, and a sender waits in prepare() when as many as the channel
// holds have not been, since the thread that reads messages from the network keeps them in memory.

/// The largest tag of a channel: by others the ends acknowledge messages.
constexpr Tag kMaxChannelTag = (1 << 16) - 1;

std::unique_ptr<Sender> make_message_sender(CommunicatorPtr group, const ChannelSpec& spec);

/// Posts up to `ahead` receives before they are asked for.
std::unique_ptr<Receiver> make_message_receiver(CommunicatorPtr group, const ChannelSpec& spec);

}  // namespace smp::comm
