// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "comm/channel.h"
#include "comm/communicator.h"
#include "comm/process_end.h"

namespace smp::comm {

/// The channels of a rank to and from the others of a group, shared by all that use them one after
/// the other. A user of channels is given lanes: the lanes to a peer are numbered, and each user
/// takes them from the first, so that further users need further channels only where they use more
/// at one time. A lane is as wide as its widest user: when one needs longer messages, or more of
/// them at a time, a new channel takes the place of the lane's old one. Tensors received on that
/// stay valid and keep its memory.
///
/// Both ends of a lane see the same users in the same order, and so replace it at the same time;
/// nothing is agreed for it. Belongs to one thread at a time.
class ChannelPool {
 public:
  /// One end of a lane, which stays where it is as long as the pool. It has one of the two.
  struct Lane {
    ChannelSpec spec;
    std::unique_ptr<Sender> sender;
    std::unique_ptr<Receiver> receiver;
  };
  struct Lanes {
    std::vector<Lane*> outgoing;
    std::vector<Lane*> incoming;
  };

  explicit ChannelPool(CommunicatorPtr group) : group_(std::move(group)) {}

  const CommunicatorPtr& group() const { return group_; }

  /// A lane for each spec, in their order, as wide as that at least; the tags are the pool's.
  /// Messages sent on the lanes have been received, or will be before the peer comes here. As
  /// `Messages::open_channels` it is called by the ranks at the other ends, too, which list the
  /// channels between two ranks in the same order, and throws its errors.
  Lanes open(const std::vector<ChannelSpec>& outgoing, const std::vector<ChannelSpec>& incoming);

 private:
  using LanesByTag = std::map<std::pair<int, int>, Lane>;  // lanes by peer and tag

  static std::vector<Lane*> take(LanesByTag& lanes, const std::vector<ChannelSpec>& specs);
  static void widen(Lane& lane, const ChannelSpec& spec);

  void close();

  CommunicatorPtr group_;
  LanesByTag outgoing_, incoming_;
  const AtWorldEnd end_{[this] { close(); }};
};

}  // namespace smp::comm
