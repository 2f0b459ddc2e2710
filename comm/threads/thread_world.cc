// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/thread_world.h"

#include <utility>

#include "comm/transport_communicator.h"
#include "core/check.h"
#include "core/host.h"

namespace smp::comm {

ThreadWorld::ThreadWorld(int ranks, std::vector<int> hosts) : hosts_(std::move(hosts)) {
  const cpu_set_t cores = core::cores_of_this_process();
  has_core_for_each_rank_ = ranks <= CPU_COUNT(&cores);
  for (int rank = 0; rank < ranks; ++rank) {
    matchers_.emplace_back(*this);
  }
}

// A send is complete at once: a message for which no receive is posted is copied.
void ThreadWorld::start(PendingMessage transfer) {
  const Message& message = transfer.message;
  const GroupState& group = transfer.group();
  if (message.direction == Message::Direction::kReceive) {
    matchers_[group.world_rank].post(std::move(transfer));
    return;
  }
  matchers_[group.world_ranks[message.peer]].deliver({group.context, group.rank, transfer.tag},
                                                     message.data, message.bytes);
  transfer.done(*this);
}

// The ranks of a group come here one after the other, and may be at their next split while others
// are still at this one: the number of the split tells which is meant.
int ThreadWorld::make_context(const GroupState& parent, int first_member) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int split = splits_[{parent.context, parent.rank}]++;
  const auto [position, is_new] =
      split_contexts_.insert({{parent.context, split, first_member}, contexts_});
  contexts_ += is_new ? 1 : 0;
  return position->second;
}

void ThreadWorld::abort(int world_rank, const std::string& reason) noexcept {
  if (set_abort_text("rank " + std::to_string(world_rank) + " failed: " + reason)) {
    aborting_rank_ = world_rank;
    for (MessageMatcher& matcher : matchers_) {
      matcher.abort();
    }
    notify();
  }
}

std::vector<CommunicatorPtr> make_thread_world(int size) {
  return make_thread_world(size, std::make_shared<ThreadWorld>(size));
}

std::vector<CommunicatorPtr> make_thread_world(int size,
                                               const std::shared_ptr<ThreadWorld>& world) {
  SMP_CHECK_WITH(UsageError, size > 0, "make_thread_world: expected at least 1 rank, got ", size,
                 ".");
  std::vector<CommunicatorPtr> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_shared<TransportCommunicator>(world, world_group(rank, size)));
  }
  return ranks;
}

}  // namespace smp::comm
