// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <tuple>

#include "comm/communicator.h"

namespace smp::comm {

/// Ranks whose devices move memory to each other: all that NCCL is needed for lies behind
/// libtorch's `c10d::Backend`.
using DeviceGroup = std::shared_ptr<c10d::Backend>;

/// The use of a group: collectives, which are to be fast, or the messages of a port, which move
/// beside computations and are to leave these the device.
enum class GroupUse { kCollectives, kLane };

/// Makes a group of `size` ranks, of which this one is `rank`. Its ranks meet under `name`. Does
/// not wait: ranks connect when they first use a group.
using MakeDeviceGroup =
    std::function<DeviceGroup(const std::string& name, int rank, int size, GroupUse use)>;

/// In a group of two.
constexpr int kSenderRank = 0;
constexpr int kReceiverRank = 1;

/// A transfer from or to a device. The tensor must stay until it has ended.
struct DeviceTransfer {
  c10::intrusive_ptr<c10d::Work> work;
  at::Tensor tensor;
};

/// The device groups of one communicator: one of all its ranks, and one for each port from a rank
/// to another. Each is made when it is first used and kept as long as the communicator, so that
/// programs, and wider channels in place of others, share them.
///
/// From the first group on a thread watches the job: when a rank has aborted, it ends the groups of
/// this rank, so that neither its devices nor a host that waits for them go on waiting for a rank
/// that is gone.
class GroupPool {
 public:
  GroupPool(CommunicatorPtr host, at::Device device, MakeDeviceGroup make);
  ~GroupPool() { close(); }
  GroupPool(const GroupPool&) = delete;
  GroupPool& operator=(const GroupPool&) = delete;

  /// Waits until the kept transfers have ended, at most for the time-out, and ends the groups.
  void close();

  /// That of all ranks. Throws the `CommError` of the rank that has aborted, if one has.
  DeviceGroup of_all();

  /// That of port `tag` to `peer`, if this rank `sends`, or from it. The first call connects the
  /// two: each waits for the other's.
  DeviceGroup of_lane(int peer, Tag tag, bool sends);

  /// Sets the timeout of all groups.
  void set_timeout(std::chrono::milliseconds timeout);

  /// Takes over a transfer that no caller waits for.
  void keep(DeviceTransfer transfer);

 private:
  DeviceGroup get(const std::string& name, int rank, int size, GroupUse use);
  void watch();
  void end_groups() noexcept;
  void check_abort();
  void forget_ended();

  const CommunicatorPtr host_;
  const at::Device device_;
  const MakeDeviceGroup make_;
  std::mutex mutex_;  // mutex of all below
  std::map<std::string, DeviceGroup> groups_;
  std::deque<DeviceTransfer> kept_;  // oldest first
  std::string abort_text_;
  bool closing_ = false;
  std::condition_variable closes_;
  std::thread watcher_;
};

/// Before transfers are given up: returns when `finished` or after `at_most`, since peers may still
/// be taking this rank's data. At once while an error is thrown, when they may never take it.
/// Returns also when `finished` throws an error of the device, which has failed then.
void let_finish(const std::function<bool()>& finished, std::chrono::milliseconds at_most) noexcept;

}  // namespace smp::comm
