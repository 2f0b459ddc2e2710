// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/device/ipc.h"
#include "comm/shm/shared_memory.h"

/// Memory of a device that a process makes for others of its host and frees when they have closed
/// it, which they tell it by memory of the hosts.
namespace smp::comm {

using IpcEvents = std::vector<std::unique_ptr<IpcEvent>>;

/// Whether a device has come to what the first `count` of these events were recorded behind.
bool are_done(const IpcEvents& events, size_t count);

/// The maker's end: the memory, and the events that others open with it.
class MadeMemory {
 public:
  /// For `openers` others.
  MadeMemory(DeviceIpc& ipc, at::Device device, int64_t bytes, int openers, size_t events);
  ~MadeMemory();
  MadeMemory(const MadeMemory&) = delete;
  MadeMemory& operator=(const MadeMemory&) = delete;

  const at::Tensor& bytes() const { return bytes_; }
  const IpcEvents& events() const { return events_; }

  /// The handles that an opener needs, with a number of the maker's.
  std::vector<IpcHandle> offer(int64_t number) const;

  /// Whether all have closed it.
  bool is_closed() const;

 private:
  DeviceIpc& ipc_;
  const uint32_t openers_;
  const std::shared_ptr<SharedMemory> closed_;  // how many have closed it
  const at::Tensor bytes_;
  IpcEvents events_;
};

/// Keeps memory that is used here no more until all have closed it, or else to the process's end.
struct RetireMemory {
  void operator()(MadeMemory* memory) const;
};
using MadeMemoryPtr = std::unique_ptr<MadeMemory, RetireMemory>;

/// Gives back retired memory that all have closed.
void free_closed_memory();

/// An opener's end.
class OpenedMemory {
 public:
  OpenedMemory(DeviceIpc& ipc, at::Device device, const std::vector<IpcHandle>& offer);
  /// Closes it: the device has used it.
  ~OpenedMemory();
  OpenedMemory(const OpenedMemory&) = delete;
  OpenedMemory& operator=(const OpenedMemory&) = delete;

  const at::Tensor& bytes() const { return bytes_; }
  const IpcEvents& events() const { return events_; }

 private:
  std::shared_ptr<SharedMemory> closed_;
  at::Tensor bytes_;
  IpcEvents events_;
};

/// The maker's number in an offer.
int64_t number_in(const std::vector<IpcHandle>& offer);

/// How many handles an offer has.
constexpr size_t offer_size(size_t events) { return events + 2; }

}  // namespace smp::comm
