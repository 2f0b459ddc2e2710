// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <memory>

namespace smp::comm {

/// Bytes that a process tells another one of its host, so that this finds memory or an event.
using IpcHandle = std::array<char, 64>;

/// A point in a stream, which streams of another process can wait for, too. Recorded at one end
/// only, again and again. Belongs to one thread at a time.
class IpcEvent {
 public:
  virtual ~IpcEvent() = default;

  /// Moves it to the end of the stream, one of its own device.
  virtual void record(const c10::Stream& stream) = 0;
  /// Lets the stream wait for where it was recorded last, as the host knows; it has been.
  virtual void block(const c10::Stream& stream) = 0;
  /// Whether a stream has come to where it was recorded last, at the end that records it; it has
  /// been.
  virtual bool query() = 0;
  /// Its name for another process, at the end that made it.
  virtual IpcHandle handle() = 0;
};

/// Memory and events of a kind of device that processes of one host share: CUDA's IPC, or its
/// counterpart. Any call may throw the device's error.
class DeviceIpc {
 public:
  virtual ~DeviceIpc() = default;

  /// Memory of uint8, which is given back with the last tensor on it. By then no other process may
  /// have it open.
  virtual at::Tensor make_memory(at::Device device, int64_t bytes) = 0;
  virtual IpcHandle handle_of(const at::Tensor& memory) = 0;
  /// Memory that another process has made and still holds, as `device` sees it, which may be
  /// another one. Closed with the last tensor on it; by then the device has used it.
  virtual at::Tensor open_memory(const IpcHandle& handle, at::Device device, int64_t bytes) = 0;

  virtual std::unique_ptr<IpcEvent> make_event(at::Device device) = 0;
  virtual std::unique_ptr<IpcEvent> open_event(const IpcHandle& handle, at::Device device) = 0;
};

/// Says how devices of a kind share memory. Called by the implementation before any are used.
void register_device_ipc(c10::DeviceType type, DeviceIpc& ipc);

/// How devices of this kind share memory. Null if they do not.
DeviceIpc* device_ipc(c10::DeviceType type);

/// Bytes of a device that this process has made for others, beside those of libtorch's allocator.
/// From any thread.
int64_t shared_bytes(at::Device device);
/// Counts memory that is made so, or given back, with a minus.
void count_shared(at::Device device, int64_t bytes);

}  // namespace smp::comm
