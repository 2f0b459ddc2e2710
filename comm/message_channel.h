// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "comm/channel.h"
#include "comm/communicator.h"

namespace smp::comm {

// Channels over the point-to-point messages of any communicator: for ranks that share no memory.
// Nothing is agreed; a message of another length is found when it arrives. A sender never waits in
// prepare(): it keeps what is under way in memory of its own.

std::unique_ptr<Sender> make_message_sender(CommunicatorPtr group, const ChannelSpec& spec);

/// Posts up to `ahead` receives before they are asked for.
std::unique_ptr<Receiver> make_message_receiver(CommunicatorPtr group, const ChannelSpec& spec);

}  // namespace smp::comm
