// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "comm/channel.h"
#include "comm/operation.h"
#include "comm/shm/shared_memory.h"
#include "comm/shm/slot_queue.h"
#include "comm/transport.h"

namespace smp::comm {

// A channel in memory that both ends map: slots for messages, and two queues of slot numbers, one
// of messages sent and one of slots given back. The sender owns a slot from when it comes back
// until it is sent, the receiver from there until the last tensor on it is gone; that a slot has
// one owner is all the exclusion there is. The next owner sees the writes of an owner, because
// slots change hands through a SlotQueue.
//
// When an end dies, its slots are lost and nothing else: a message half written was never pushed.

/// Where things are in the memory of a channel.
class SharedLayout {
 public:
  explicit SharedLayout(const ChannelSpec& spec);

  uint32_t slots() const { return slots_; }
  size_t total() const { return slot(slots_); }

  size_t sent_queue() const { return SharedMemory::kReserved; }
  size_t free_queue() const { return sent_queue() + SlotQueue::bytes(slots_); }
  size_t slot(uint32_t index) const {
    return free_queue() + SlotQueue::bytes(slots_) + index * slot_bytes_;
  }

 private:
  uint32_t slots_;
  size_t slot_bytes_;  // a multiple of 64
};

/// How one end waits for the other.
class PeerWait {
 public:
  /// `verb` and `spec` tell the purpose of the wait, for its texts.
  PeerWait(std::shared_ptr<Transport> transport, std::shared_ptr<const GroupState> group,
           const char* verb, const ChannelSpec& spec, ProcessWatch peer);

  /// How long the messages waited for are, for its texts.
  void set_bytes(int64_t bytes) { info_.bytes = static_cast<size_t>(bytes); }

  /// Waits until it can pop from the queue: looks again for some microseconds if there are cores
  /// enough, then sleeps. Throws a `CommError` when a rank has aborted or the peer has ended, and a
  /// `TimeoutError`.
  uint32_t pop(SlotQueue& queue) const;

 private:
  std::optional<uint32_t> look_for_peer(SlotQueue& queue) const;

  std::shared_ptr<Transport> transport_;
  std::shared_ptr<const GroupState> group_;
  OperationInfo info_;
  ProcessWatch peer_;
};

std::unique_ptr<Sender> make_shared_sender(std::shared_ptr<SharedMemory> memory,
                                           const ChannelSpec& spec, PeerWait wait);
std::unique_ptr<Receiver> make_shared_receiver(std::shared_ptr<SharedMemory> memory,
                                               const ChannelSpec& spec, PeerWait wait);

}  // namespace smp::comm
