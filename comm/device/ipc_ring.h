// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/channel.h"
#include "comm/device/ipc_memory.h"

/// The memory of a channel between devices of two processes: slots that the sender writes one after
/// the other, and that the receiver copies from in this order. Each end opens its part when it has
/// heard of the other's: asked by the receiver, `ask` and `SentRing`; offered by the sender,
/// `offer` and `open`.
namespace smp::comm {

/// The sender's end. Belongs to one thread at a time.
class SentRing {
 public:
  /// Makes the memory, for a channel whose receiver asks for it.
  SentRing(DeviceIpc& ipc, const ChannelSpec& spec, const std::vector<IpcHandle>& asked);

  std::vector<IpcHandle> offer();

  /// The next slot, to be written on `stream`, which waits until the receiver has copied the
  /// message that was there before: the receiver's host has asked for that.
  at::Tensor take(int64_t bytes, const c10::Stream& stream);
  /// Gives the slot that was taken to the receiver, as soon as `stream` has written it.
  void send(const c10::Stream& stream);

  /// Whether the device has written all that was sent, or has failed.
  bool is_idle() const;

 private:
  ChannelSpec spec_;
  MadeMemoryPtr memory_;  // its events: slots are written
  at::Tensor slots_;      // [slot, byte]
  IpcEvents taken_;
  uint64_t sent_ = 0;
};

/// The receiver's end. Belongs to one thread at a time.
class ReceivedRing {
 public:
  ReceivedRing(DeviceIpc& ipc, const ChannelSpec& spec);

  std::vector<IpcHandle> ask();
  /// Opens what was offered. Throws a `CommError` that names the group if the ends disagree on the
  /// length of messages.
  void open(const std::vector<IpcHandle>& offered, const std::string& group);

  /// Copies the next message to `elements` on `stream`, as soon as it is there. Its sender's host
  /// has sent it.
  void receive(const at::Tensor& elements, const c10::Stream& stream);

  /// Whether the device has copied all that was received, or has failed.
  bool is_idle() const;

 private:
  DeviceIpc& ipc_;
  const ChannelSpec spec_;
  IpcEvents taken_;
  std::unique_ptr<OpenedMemory> memory_;  // closed when the slots are gone
  at::Tensor slots_;
  uint64_t received_ = 0;
};

/// How many handles an end asks for or offers.
size_t handles_asked(const ChannelSpec& spec);
size_t handles_offered(const ChannelSpec& spec);

}  // namespace smp::comm
