// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "comm/channel.h"
#include "comm/communicator.h"

namespace smp::comm {

/// The channels of a rank to and from the others of a group, shared by all that use them one after
/// the other. A user of channels is given ports: the ports to a peer are numbered, and each user
/// takes them from the first, so that further users need further channels only where they use more
/// at one time. A port is as wide as its widest user: when one needs longer messages, or more of
/// them at a time, a new channel takes the place of the port's old one. Tensors received on that
/// stay valid and keep its memory.
///
/// Both ends of a port see the same users in the same order, and so replace it at the same time;
/// nothing is agreed for it. Belongs to one thread at a time.
class ChannelPool {
 public:
  /// One end of a port, which stays where it is as long as the pool. It has one of the two.
  struct Port {
    ChannelSpec spec;
    std::unique_ptr<Sender> sender;
    std::unique_ptr<Receiver> receiver;
  };
  struct Ports {
    std::vector<Port*> outgoing;
    std::vector<Port*> incoming;
  };

  explicit ChannelPool(CommunicatorPtr group) : group_(std::move(group)) {}

  const CommunicatorPtr& group() const { return group_; }

  /// A port for each spec, in their order, as wide as that at least; the tags are the pool's.
  /// Messages sent on the ports have been received, or will be before the peer comes here. As
  /// `Messages::open_channels` it is called by the ranks at the other ends, too, which list the
  /// channels between two ranks in the same order, and throws its errors.
  Ports open(const std::vector<ChannelSpec>& outgoing, const std::vector<ChannelSpec>& incoming);

 private:
  using PortsByTag = std::map<std::pair<int, int>, Port>;  // ports by peer and tag

  static std::vector<Port*> take(PortsByTag& ports, const std::vector<ChannelSpec>& specs);
  static void widen(Port& port, const ChannelSpec& spec);

  void close();

  CommunicatorPtr group_;
  PortsByTag outgoing_, incoming_;
  const AtWorldEnd end_{*group_, [this] { close(); }};
};

}  // namespace smp::comm
