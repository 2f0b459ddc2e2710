// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

#include "comm/nccl/group_pool.h"

namespace smp::testing {

/// The messages that a rank has sent.
struct Traffic {
  int64_t messages = 0;
  int64_t bytes = 0;
};

/// Stands for NCCL between rank threads: groups of libtorch's whose collectives are made of counted
/// messages, in the ways that NCCL has for large tensors: rings, and all-to-all pair by pair.
/// Reductions add as the ring goes, which is another order for each part of a tensor. A call
/// returns when this rank's part is done.
class FakeNetwork {
 public:
  /// For a communicator's rank `rank`.
  comm::MakeDeviceGroup groups(int rank);

  /// The messages of the rank since the last call.
  Traffic take_sent(int rank);

  /// The groups that the rank has made, in order.
  std::vector<std::string> made(int rank);
  /// Those of them that are for ports.
  std::vector<std::string> ports(int rank);

  /// Returns when so many ranks wait for a message.
  void await_waiting(size_t ranks);

 private:
  friend class FakeGroup;
  using Mailbox = std::tuple<std::string, int, int>;  // group, sender, receiver

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Mailbox, std::deque<at::Tensor>> mail_;
  std::map<int, Traffic> sent_;
  std::map<int, std::vector<std::string>> made_, lanes_;
  std::set<std::pair<int, std::string>> aborted_;
  size_t waiting_ = 0;
};

}  // namespace smp::testing
