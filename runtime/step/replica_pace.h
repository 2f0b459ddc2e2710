// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace smp::runtime {

/// The message of a replica to the others when they reduce the gradients of a step.
struct ReplicaPace {
  int64_t updates = 0;       ///< steps of `DistributedOptimizer`s before
  int64_t has_bad_loss = 0;  ///< see `LossWatch`
  int64_t microbatches = 0;  ///< into how many its batch is cut; 0: it has none
};

/// Exchanges the paces of all replicas while the constructor's caller goes on. Internal.
class PaceExchange {
 public:
  /// Collective over `replicas`.
  PaceExchange(comm::Communicator& replicas, const ReplicaPace& mine);
  /// Those of all replicas.
  std::vector<ReplicaPace> wait();

 private:
  at::Tensor mine_, all_;
  WorkPtr work_;
};

/// Throws a `UsageError` on all replicas where one has updated its parameters more often than
/// another: from then on they sum gradients of different steps. Replicas that leave out the step as
/// well as the update cannot be told apart; they end before the others.
void check_same_pace(const std::vector<ReplicaPace>& all, const std::string& step_name);

}  // namespace smp::runtime
