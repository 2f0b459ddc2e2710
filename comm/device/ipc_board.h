// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "comm/collective.h"
#include "comm/device/ipc_memory.h"
#include "comm/transport_communicator.h"

namespace smp::comm {

/// Memory by which ranks of one host give each other tensors of their devices: each rank has two
/// slots, used in turn, which it writes and all may read. It has two events for each slot: it is
/// written, and this rank has read the others' of the same step.
///
/// A step: a rank's stream waits until all have read the slot's last content, and writes it. The
/// rank meets the others' hosts. Its stream waits until the others have written, and reads. So
/// streams wait for streams, and hosts for hosts. Two slots are enough: a rank that has met the
/// others in step s knows that they have recorded their events of writing in s and of reading in
/// s - 1. Belongs to the rank's turns (`CollectiveTurn`), and works on the current stream.
class IpcBoard {
 public:
  using Write = std::function<void(const at::Tensor& slot)>;
  using Read = std::function<void()>;

  /// Collective. `slot_bytes` are a multiple of 256.
  IpcBoard(CollectiveTurn& turn, DeviceIpc& ipc, at::Device device, int rank, int ranks,
           int64_t slot_bytes);
  /// Closes the others' memory, and gives its own back when they have closed it. Keeps all to the
  /// process's end if a device may yet use it.
  ~IpcBoard();
  IpcBoard(const IpcBoard&) = delete;
  IpcBoard& operator=(const IpcBoard&) = delete;

  int64_t slot_bytes() const { return slot_bytes_; }

  /// One step of a call, of which all ranks make as many. Returns as `CollectiveTurn::meet` does.
  int64_t step(CollectiveTurn& turn, const Collective& call, const Write& write, const Read& read);

  /// Within `read` of a step: bytes of a rank's slot, on this rank's device. The current stream
  /// comes after them.
  at::Tensor read(int rank, int64_t begin, int64_t bytes);

  /// Whether devices have done the work of this rank, or have failed.
  bool is_idle() const;

 private:
  static constexpr int64_t kSlots = 2;

  // One rank's memory, and its events: of each slot, written and then read.
  struct Part {
    at::Tensor slots;  // [slot, byte]
    const IpcEvents* events;
  };

  c10::Stream stream_of(at::Device device);

  const at::Device device_;
  const int rank_;
  const int64_t slot_bytes_;
  MadeMemoryPtr own_;
  std::vector<std::unique_ptr<OpenedMemory>> others_;
  std::vector<Part> parts_;                       // parts by rank
  std::map<c10::DeviceIndex, c10::Stream> side_;  // streams of other devices
  int64_t slot_ = 0;                              // slot of the last step
};

}  // namespace smp::comm
