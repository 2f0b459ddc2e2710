// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/replica_pace.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include "core/check.h"

namespace smp::runtime {

PaceExchange::PaceExchange(comm::Communicator& replicas, const ReplicaPace& mine)
    : mine_(at::tensor({mine.updates, mine.has_bad_loss, mine.microbatches})),
      all_(at::empty({replicas.size(), mine_.numel()}, at::kLong)) {
  work_ = replicas.async().all_gather(all_, mine_);
}

std::vector<ReplicaPace> PaceExchange::wait() {
  work_->wait();
  std::vector<ReplicaPace> result;
  const auto* const numbers = all_.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < all_.size(0); ++r) {
    const auto* const of_replica = numbers + r * mine_.numel();
    result.push_back({of_replica[0], of_replica[1], of_replica[2]});
  }
  return result;
}

void check_same_pace(const std::vector<ReplicaPace>& all, const std::string& step_name) {
  for (size_t r = 1; r < all.size(); ++r) {
    SMP_CHECK_WITH(UsageError, all[r].updates == all[0].updates, "step function \"", step_name,
                   "\": before this step, optimizer.step() was called ", all[0].updates,
                   " times on replica 0 and ", all[r].updates, " times on replica ", r,
                   ". A replica that leaves out a step of training or an update sums its gradients "
                   "with those of another step of the others from then on. Call the step function "
                   "and optimizer.step() on all replicas alike, whatever their data; a batch that "
                   "is not to count has a loss multiplied by zero");
  }
}

}  // namespace smp::runtime
