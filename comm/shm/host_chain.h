// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "comm/collective.h"
#include "comm/deadline.h"
#include "comm/operation.h"
#include "comm/rounds.h"
#include "comm/shm/host_board.h"
#include "comm/shm/share.h"
#include "comm/transport.h"

namespace smp::comm {

/// Large all_reduces of a group on several hosts, the ranks of each following each other in the
/// group. The hosts are a chain: the first adds its ranks' values, in their order, and sends the
/// sums to the second, which goes on with its own ranks; the last has the results and sends them
/// back. So the order is that of the ranks, and a host sends and receives the tensor once or, in
/// the middle of the chain, twice. (Sums of float16 and bfloat16 travel as float32.)
///
/// The tensor is divided among as many lanes as the smallest host has ranks; the i-th rank of each
/// host adds and sends the i-th slice, in chunks, so that all hosts and lanes work at the same
/// time. Within a host, data pass through the board's buffers.
class HostChain {
 public:
  HostChain(std::shared_ptr<Transport> transport, std::shared_ptr<const GroupState> group,
            const HostLayout& layout, std::unique_ptr<HostBoard> board);

  /// Small ones are faster as messages from rank to rank.
  bool takes(const Collective& call) const;

  /// Runs a call that was checked. All ranks of a host throw when their calls do not match, and the
  /// ends of a lane when theirs do not; `calls` is how these hear of each other's.
  void run(const Collective& call, const CallExchange& calls, const OperationInfo& info,
           const Deadline& deadline);

 private:
  const std::shared_ptr<Transport> transport_;
  const std::shared_ptr<const GroupState> group_;
  const std::unique_ptr<HostBoard> board_;
  int lanes_;
  int previous_ = -1;  // the ranks of the group at the other ends of this rank's lane
  int next_ = -1;
};

}  // namespace smp::comm
