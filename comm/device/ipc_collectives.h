// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "comm/device/ipc.h"
#include "comm/device/ipc_board.h"

namespace smp::comm {

/// The bytes of a slot of an IpcBoard, for calls that fit into a small one and for others. A rank
/// makes two of each for a group that needs them.
struct SlotSizes {
  int64_t small = int64_t{1} << 20;
  int64_t large = int64_t{8} << 20;
};

/// Collectives of a group of one host on tensors of devices, by memory that its ranks share. They
/// take turns with the collectives of the host, where the ranks' calls are compared; no host waits
/// for a device.
///
/// Tensors pass slice by slice, each in a slot (IpcBoard). Reductions add the ranks' parts in rank
/// order, with the bits of those on the host. An all_reduce of a slice is one step, in which each
/// rank reads and adds all parts; or, where three ranks or more read less so and the slice is
/// longer than a small slot, two: each adds its share, and all read the sums.
///
/// Owned by a communicator and by its outstanding tasks; used by the communicator's thread.
class IpcCollectives : public std::enable_shared_from_this<IpcCollectives> {
 public:
  /// The group has turns.
  IpcCollectives(const Communicator& host, at::Device device, DeviceIpc& ipc,
                 const SlotSizes& sizes = {});
  /// Keeps to the process's end what a device may yet use.
  ~IpcCollectives();
  IpcCollectives(const IpcCollectives&) = delete;
  IpcCollectives& operator=(const IpcCollectives&) = delete;

  // `host` is always the group's communicator. Calls are checked here.

  /// Runs a collective on the current stream.
  void run(Communicator& host, const Collective& call);
  /// Runs one on a side stream, beside the next work of the current stream.
  WorkPtr start(Communicator& host, const Collective& call);
  WorkPtr start(Communicator& host, const CollectiveTask& task);

  /// Whether all that was started has ended on host and device.
  bool is_idle() const;

 private:
  struct Flight;
  class FlightWork;
  using Body = std::function<void(CollectiveTurn&)>;

  Collective checked(const Collective& call) const;
  Body on_stream(const c10::Stream& stream, Body body) const;
  WorkPtr on_side_stream(Communicator& host, Body body);
  void forget_ended();
  void move(CollectiveTurn& turn, const Collective& call);
  IpcBoard& board_for(CollectiveTurn& turn, const Collective& call);

  const std::string group_;
  const int rank_, size_;
  const at::Device device_;
  DeviceIpc& ipc_;
  const SlotSizes sizes_;
  std::optional<c10::Stream> side_;              // from the first start on
  std::deque<std::shared_ptr<Flight>> flights_;  // oldest first
  // Used in turns only:
  std::unique_ptr<IpcBoard> small_, large_;
  bool has_failed_ = false;
};

}  // namespace smp::comm
