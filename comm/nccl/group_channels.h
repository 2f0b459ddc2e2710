// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "comm/channel.h"
#include "comm/nccl/group_pool.h"

/// Channels whose elements move from device to device over groups of two.
namespace smp::comm {

/// One end of a channel that a rank opens.
struct ChannelEnd {
  bool sends;
  size_t index;  ///< among the outgoing or the incoming channels
};

/// In which order rank `rank` connects the channels that move elements on the device. Two ranks are
/// connected when both have come to it, and each waits for the other: so all ranks take the
/// channels in one order, and none waits in a circle.
std::vector<ChannelEnd> connection_order(int rank, const std::vector<ChannelSpec>& outgoing,
                                         const std::vector<ChannelSpec>& incoming);

/// A sender of messages whose header goes over `host` and whose elements over `group`, of `pool`.
/// Messages that have not left when it goes away are kept there.
std::unique_ptr<Sender> make_group_sender(std::unique_ptr<Sender> host, DeviceGroup group,
                                          const ChannelSpec& spec, std::shared_ptr<GroupPool> pool);

/// Its other end. A transfer is asked for when the header has come, and so after the sender asked
/// for it: nothing that one device waits for then waits for a host.
std::unique_ptr<Receiver> make_group_receiver(std::unique_ptr<Receiver> host, DeviceGroup group,
                                              const ChannelSpec& spec,
                                              std::shared_ptr<GroupPool> pool);

}  // namespace smp::comm
