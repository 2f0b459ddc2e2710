// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/hand_over.h"
#include "comm/message_matcher.h"
#include "comm/transport.h"

namespace smp::comm {

/// The state that the rank threads of one world share: a matcher for each rank's messages. Every
/// rank uses it as its transport, and waits on its one condition variable.
class ThreadWorld final : public Transport {
 public:
  /// A world of so many ranks. Ranks may pretend to be on different hosts: `hosts` has a number for
  /// each; empty means one host for all.
  explicit ThreadWorld(int ranks, std::vector<int> hosts = {});

  void start(PendingMessage transfer) override;
  int make_context(const GroupState& parent, int first_member) override;
  bool shares_memory(int this_rank, int other) const override {
    return hosts_.empty() || hosts_[this_rank] == hosts_[other];
  }
  bool has_core_for_each_rank() const override { return has_core_for_each_rank_; }
  void abort(int world_rank, const std::string& reason) noexcept override;
  HandOverQueues* queues_between(int this_rank, int other) override {
    return shares_memory(this_rank, other) ? &queues_ : nullptr;
  }

  /// The rank whose abort came first, -1 if none has called it.
  int aborting_rank() const { return aborting_rank_; }

 private:
  const std::vector<int> hosts_;  // hosts by rank
  bool has_core_for_each_rank_;
  std::atomic<int> aborting_rank_{-1};
  std::deque<MessageMatcher> matchers_;  // matchers by receiving rank
  HandOverQueues queues_;
  std::mutex mutex_;                                         // guards everything below
  int contexts_ = 1;                                         // 0 is the world
  std::map<std::pair<int, int>, int> splits_;                // (parent, rank) -> splits so far
  std::map<std::tuple<int, int, int>, int> split_contexts_;  // (parent, split, first) -> context
};

/// Makes a world of `size` ranks inside this process; element r is for the thread that plays rank
/// r. A sent tensor is copied at once. Nothing runs in the background: a message is moved by
/// whichever of its two threads comes second.
std::vector<CommunicatorPtr> make_thread_world(int size);

/// The same over a world made by the caller, which no other ranks use.
std::vector<CommunicatorPtr> make_thread_world(int size, const std::shared_ptr<ThreadWorld>& world);

}  // namespace smp::comm
