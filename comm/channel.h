// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace smp::comm {

/// How long messages are.
struct MessageSize {
  int64_t bytes;
  /// The same as `ChannelSpec::host_bytes`.
  int64_t host_bytes = 0;
};

/// One directed stream of messages between two ranks. Both ends give the same numbers.
struct ChannelSpec {
  int peer;       ///< The rank at the other end.
  int tag;        ///< Tag of the group's messages; used by nothing else while the channel is open.
  int64_t bytes;  ///< Length of the longest message; may be 0.
  /// The messages that the receiver is expected to hold at one time. It may hold more, which costs
  /// a copy of each further one.
  int held = 1;
  /// The messages that the sender can always send beyond those held, at least 1. It waits when as
  /// many have not been received.
  int ahead = 2;
  /// Where this end's tensors lie that are copied into and out of the messages.
  at::Device device = at::kCPU;
  /// So many first bytes of a message are for the host. Where a group moves memory from device to
  /// device, the rest does not pass through the host (`device_part`).
  int64_t host_bytes = 0;
};

/// Whether a channel has elements that need not pass through the host. The ends agree on it.
inline bool moves_on_device(const ChannelSpec& spec) {
  return !spec.device.is_cpu() && spec.bytes > spec.host_bytes;
}

/// Length of the longest part behind the first bytes of a channel's messages.
inline int64_t element_bytes(const ChannelSpec& spec) { return spec.bytes - spec.host_bytes; }

/// The part of a channel's messages that goes through the host: the first bytes where the rest
/// moves on the device, otherwise all.
inline ChannelSpec host_part(ChannelSpec spec) {
  if (moves_on_device(spec)) {
    spec.bytes = spec.host_bytes;
    spec.device = at::kCPU;
  }
  return spec;
}

/// The end that sends. Belongs to one thread at a time.
class Sender {
 public:
  virtual ~Sender() = default;

  /// How long messages are from the next on, at most as long as the spec says, which holds until
  /// the first call. Both ends say the same of each message.
  virtual void set_size(const MessageSize& size) = 0;

  /// The memory to write the next message into: its bytes of uint8, which start at a multiple of 64
  /// bytes, with undefined content. Called again before send() it gives the same memory. Waits
  /// until there is room on the channel: when it returns, fewer than `held + ahead` messages are
  /// sent that the receiver has not begun to receive. Throws as `Work::wait` does.
  virtual const at::Tensor& prepare() = 0;

  /// Where the bytes of the message behind `host_bytes` go, when they travel from device to device:
  /// uint8 on the device, of the memory that prepare() gave the rest of. Writes to it must be on
  /// the current stream. Undefined when all of the message is in host memory.
  virtual at::Tensor device_part() { return {}; }

  /// Sends the message written since prepare(). Does not wait. The memory is the channel's again.
  virtual void send() = 0;

  /// Returns when the messages sent need this rank no more.
  virtual void flush() = 0;
};

/// The end that receives. Belongs to one thread at a time; the tensors received to any.
class Receiver {
 public:
  virtual ~Receiver() = default;

  /// Does the same as `Sender::set_size`. Called when no message is expected.
  virtual void set_size(const MessageSize& size) = 0;

  /// Says that so many further messages will come, so that they can move while this rank computes.
  /// No more than those expected may be received.
  virtual void expect(int messages) = 0;

  /// Whether receive() would return at once. May be false where it would.
  virtual bool has_arrived() { return false; }

  /// Waits for the next message and returns it, as `Sender::prepare` describes. Its memory goes
  /// back to the channel when the last tensor on it is gone, in any order and on any thread, also
  /// after the channel. Throws as `Work::wait` does.
  virtual at::Tensor receive() = 0;

  /// The rest of the message that receive() returned, as in `Sender::device_part`. The current
  /// stream of receive() comes after its arrival.
  virtual at::Tensor device_part() { return {}; }
};

/// Ends of channels, in the order of the specs.
struct Channels {
  std::vector<std::unique_ptr<Sender>> senders;
  std::vector<std::unique_ptr<Receiver>> receivers;
};

}  // namespace smp::comm
