// SPDX-License-Identifier: Apache-2.0
#include "pipeline/walk.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"

namespace smp::pipeline {
namespace {

/// The messages of one directed edge and direction of the pass, which go in microbatch order.
struct Channel {
  int sent = 0;
  int received = 0;
};

class Walker {
 public:
  Walker(const Schedule& schedule, int credit)
      : schedule_(schedule),
        credit_(credit),
        positions_(static_cast<size_t>(schedule.ranks()), 0),
        channels_(stages() * stages()),
        is_awake_(positions_.size(), false) {
    SMP_CHECK(credit >= 1, "the credit of a channel must be at least 1 message, got ", credit, ".");
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      wake(rank);
    }
  }

  /// Goes on until no rank can.
  void run(const Visit& visit) {
    while (!awake_.empty()) {
      const int rank = awake_.back();
      awake_.pop_back();
      is_awake_[static_cast<size_t>(rank)] = false;
      advance(rank, visit);
    }
  }

  /// The first rank that is not at its end, or -1.
  int stuck_rank() const {
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      if (position(rank) < schedule_.actions(rank).size()) {
        return rank;
      }
    }
    return -1;
  }

  std::string describe_deadlock() const {
    std::string text = c10::str("the schedule has a deadlock with a credit of ", credit_,
                                " unreceived message(s) for each channel:");
    for (const int rank : circle_from(stuck_rank())) {
      const auto awaited = awaited_by(rank);
      const int other = schedule_.rank_of(awaited.stage);
      text += c10::str("\n  rank ", rank, " at ", describe_current(rank), " waits for ",
                       to_string(awaited), ", which rank ", other,
                       " has not done: it is blocked at ", describe_current(other));
    }
    return text + "\nPut the actions into another order, or give the channels more credit.";
  }

 private:
  size_t stages() const { return static_cast<size_t>(schedule_.stages()); }
  size_t position(int rank) const { return positions_[static_cast<size_t>(rank)]; }
  const Action& current(int rank) const { return schedule_.actions(rank)[position(rank)]; }

  std::string describe_current(int rank) const {
    return c10::str("action ", position(rank), " (", to_string(current(rank)), ")");
  }

  // Edges go to later stages and gradients to earlier ones, so a pair of stages is one channel.
  size_t channel_key(const Action& transfer) const {
    const bool send = transfer.is_send();
    const auto from = static_cast<size_t>(send ? transfer.stage : transfer.peer);
    const auto to = static_cast<size_t>(send ? transfer.peer : transfer.stage);
    return from * stages() + to;
  }

  const Channel& channel(const Action& transfer) const { return channels_[channel_key(transfer)]; }

  bool blocked(const Action& action) const {
    if (action.is_send()) {
      return channel(action).sent - channel(action).received == credit_;
    }
    return action.is_recv() && action.microbatch >= channel(action).sent;
  }

  void advance(int rank, const Visit& visit) {
    auto& position = positions_[static_cast<size_t>(rank)];
    const auto& actions = schedule_.actions(rank);
    for (; position < actions.size() && !blocked(actions[position]); ++position) {
      perform(rank, actions[position], visit);
    }
  }

  void perform(int rank, const Action& action, const Visit& visit) {
    visit(rank, position(rank), action);
    if (action.is_transfer()) {
      auto& used = channels_[channel_key(action)];
      ++(action.is_send() ? used.sent : used.received);
      wake(schedule_.rank_of(action.peer));
    }
  }

  void wake(int rank) {
    if (!is_awake_[static_cast<size_t>(rank)]) {
      is_awake_[static_cast<size_t>(rank)] = true;
      awake_.push_back(rank);
    }
  }

  /// The action for which the blocked transfer of `rank` waits: the send of its receive, or the
  /// receive of the oldest message in its full channel.
  Action awaited_by(int rank) const {
    auto action = current(rank);
    if (action.is_send()) {
      action.microbatch = channel(action).received;
    }
    return counterpart(action);
  }

  /// Every rank waits for another, so following that leads into a circle. Begins at its lowest
  /// rank.
  std::vector<int> circle_from(int rank) const {
    std::vector<int> path;
    auto seen = path.end();
    while (seen == path.end()) {
      path.push_back(rank);
      rank = schedule_.rank_of(awaited_by(rank).stage);
      seen = std::find(path.begin(), path.end(), rank);
    }
    path.erase(path.begin(), seen);
    std::rotate(path.begin(), std::min_element(path.begin(), path.end()), path.end());
    return path;
  }

  const Schedule& schedule_;
  int credit_;
  std::vector<size_t> positions_;  // position of each rank's next action
  std::vector<Channel> channels_;  // channels by key
  std::vector<int> awake_;         // ranks that may be able to go on
  std::vector<bool> is_awake_;     // whether each rank is awake
};

bool deadlocks(const Schedule& schedule, int credit) {
  Walker walker(schedule, credit);
  walker.run([](int, size_t, const Action&) {});
  return walker.stuck_rank() >= 0;
}

}  // namespace

void walk(const Schedule& schedule, int credit, const Visit& visit) {
  Walker walker(schedule, credit);
  walker.run(visit);
  SMP_CHECK(walker.stuck_rank() < 0, walker.describe_deadlock());
}

int least_credit(const Schedule& schedule, int at_least) {
  const int most = schedule.microbatches();
  int credit = std::min(at_least, most);
  while (credit < most && deadlocks(schedule, credit)) {
    ++credit;
  }
  return credit;
}

}  // namespace smp::pipeline
