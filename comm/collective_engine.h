// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/call.h"
#include "comm/deadline.h"
#include "comm/operation.h"
#include "comm/rounds.h"
#include "comm/shm/host_chain.h"
#include "comm/shm/host_collectives.h"
#include "comm/shm/share.h"
#include "comm/transport.h"

namespace smp::comm {

/// Runs the collectives of a group of two ranks or more, one at a time (see CollectiveQueue), by
/// the fastest algorithm that the ranks' hosts allow:
///
/// - all on one host, which can map each other's memory: HostCollectives;
/// - on several hosts, the ranks of each following each other in the group: a large all_reduce by
///   HostChain, anything else as lists of messages (rounds.h);
/// - otherwise as lists of messages.
///
/// All add in ascending rank order, so the bits do not depend on the choice. The first collective
/// finds out how the ranks lie.
class CollectiveEngine {
 public:
  CollectiveEngine(std::shared_ptr<Transport> transport, std::shared_ptr<const GroupState> group);

  /// Runs a call that was checked (check_collective); throws as `Work::wait` does.
  void run(const Collective& call, const Deadline& deadline);

  /// Whether the ranks can meet without messages: they share memory of their one host. The same on
  /// all ranks, from the first collective on.
  bool can_meet() const { return host_ != nullptr; }
  /// See HostCollectives::meet. The ranks can.
  int64_t meet(const Collective& call, const Deadline& deadline);

  /// See Communicator::shared_tensor.
  at::Tensor shared_tensor(int64_t numel, at::ScalarType dtype, const Deadline& deadline);

 private:
  void set_up(const OperationInfo& info, const Deadline& deadline);
  void run_rounds(const Collective& call, std::vector<Round> rounds, const OperationInfo& info,
                  const Deadline& deadline);
  MessageCollectives messages(const OperationInfo& info, const Deadline& deadline);
  void compare_calls(const Call& call, const OperationInfo& info, const Deadline& deadline);
  OperationInfo next_info(const char* verb, size_t bytes);

  const std::shared_ptr<Transport> transport_;
  const std::shared_ptr<const GroupState> group_;
  int64_t collectives_ = 0;
  bool is_set_up_ = false;
  HostLayout layout_;
  std::unique_ptr<HostCollectives> host_;  // at most one of the two
  std::unique_ptr<HostChain> chain_;
};

}  // namespace smp::comm
