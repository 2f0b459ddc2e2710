// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>

#include "comm/channel.h"

/// Channels between ranks that are threads of one process and so see each other's device memory:
/// elements are handed over where the sender has put them, with an event behind which they are
/// there (comm/split_channel.h).
namespace smp::comm {

/// The elements of a message, in memory of the stream that makes them.
struct HandedOver {
  at::Tensor elements;
  c10::Stream stream;
  c10::Event made;
};

/// Elements that the sender of one channel has handed over and the receiver has not yet taken,
/// oldest first. Used by both ends.
class HandOverQueue {
 public:
  void put(HandedOver given);
  /// Takes the oldest, which is there since its message's first bytes came after it.
  HandedOver take();

 private:
  std::mutex mutex_;
  std::deque<HandedOver> given_;
};

/// The queues between the rank threads of one process. Used by all of them.
class HandOverQueues {
 public:
  /// The group's number, the world's ranks of sender and receiver, the tag.
  using Channel = std::tuple<int, int, int, int>;

  /// The queue of a channel that this rank opens at one end. Both ends open those of one `Channel`
  /// in the same order, so whichever comes second gets the other's.
  std::shared_ptr<HandOverQueue> open(const Channel& channel, bool sends);

 private:
  std::mutex mutex_;
  /// Queues that one end has opened so far, by channel and whether that is the sender.
  std::map<std::pair<Channel, bool>, std::deque<std::shared_ptr<HandOverQueue>>> half_open_;
};

/// A sender whose elements are in memory of the stream that is current in prepare() and send().
/// `host` has the first bytes.
std::unique_ptr<Sender> make_handing_sender(std::unique_ptr<Sender> host,
                                            std::shared_ptr<HandOverQueue> queue,
                                            const ChannelSpec& spec);

/// Its other end. Elements in memory of the stream that is current in receive() are received where
/// they lie; others are copied into such memory by the device, and the sender's is kept until then.
std::unique_ptr<Receiver> make_handing_receiver(std::unique_ptr<Receiver> host,
                                                std::shared_ptr<HandOverQueue> queue,
                                                const ChannelSpec& spec);

}  // namespace smp::comm
