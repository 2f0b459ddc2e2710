// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/channel.h"

/// Channels whose elements move from device to device over groups of libtorch's: all that NCCL is
/// needed for lies behind `c10d::Backend`.
namespace smp::comm {

/// Of two ranks, the sender and the receiver.
using ChannelGroup = std::shared_ptr<c10d::Backend>;
constexpr int kSenderRank = 0;
constexpr int kReceiverRank = 1;

/// What goes through the host: the first bytes where the rest moves on the device, otherwise all.
std::vector<ChannelSpec> host_parts(std::vector<ChannelSpec> specs);

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

/// Before a group is given up: returns when `finished` or after `at_most`, since peers may still be
/// taking what this rank gave. At once while an error is thrown, when they may never take it.
void let_finish(const std::function<bool()>& finished, std::chrono::milliseconds at_most);

/// A sender of messages whose header goes over `host` and whose elements over `group`. When it goes
/// away it waits, at most for `timeout`, until they have left.
std::unique_ptr<Sender> make_group_sender(std::unique_ptr<Sender> host, ChannelGroup group,
                                          const ChannelSpec& spec,
                                          std::chrono::milliseconds timeout);

/// Its other end. A transfer is asked for when the header has come, and so after the sender asked
/// for it: nothing that one device waits for then waits for a host.
std::unique_ptr<Receiver> make_group_receiver(std::unique_ptr<Receiver> host, ChannelGroup group,
                                              const ChannelSpec& spec);

}  // namespace smp::comm
