// SPDX-License-Identifier: Apache-2.0
#include "pipeline/walk.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"

namespace smp::pipeline {
namespace {

/// The messages of one directed edge and direction of the pass, which go in microbatch order.
struct Channel {
  int sent() const { return static_cast<int>(sent_at.size()); }

  std::vector<int> sent_at;  // time of sending by microbatch
  int received = 0;
};

class Walker {
 public:
  Walker(const Schedule& schedule, int credit)
      : schedule_(schedule),
        credit_(credit),
        positions_(static_cast<size_t>(schedule.ranks()), 0),
        clocks_(positions_.size(), 0),
        channel_of_(2 * stages() * stages(), kNone),
        is_awake_(positions_.size(), false) {
    SMP_CHECK(credit >= 1, "the credit of a channel must be at least 1 message, got ", credit, ".");
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      for (const auto& action : schedule.actions(rank)) {
        if (action.is_send()) {
          add_channel(action);
        }
      }
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

  /// Breaks a deadlock: of the messages that wait in full channels of the circle, one that its
  /// receiver waits for least is received now, before the action at which that rank is blocked.
  /// False if no rank in the circle sends.
  bool receive_early(const Visit& visit) {
    std::optional<Action> best;
    for (const int rank : circle_from(stuck_rank())) {
      if (current(rank).is_send()) {
        const auto receive = awaited_by(rank);
        if (!best || wait_for(receive) < wait_for(*best)) {
          best = receive;
        }
      }
    }
    if (best) {
      perform(schedule_.rank_of(best->stage), *best, visit);
    }
    return best.has_value();
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
  static constexpr int kNone = -1;

  size_t stages() const { return static_cast<size_t>(schedule_.stages()); }
  size_t position(int rank) const { return positions_[static_cast<size_t>(rank)]; }
  const Action& current(int rank) const { return schedule_.actions(rank)[position(rank)]; }

  std::string describe_current(int rank) const {
    return c10::str("action ", position(rank), " (", to_string(current(rank)), ")");
  }

  size_t channel_key(const Action& transfer) const {
    const bool send = transfer.is_send();
    const auto from = static_cast<size_t>(send ? transfer.stage : transfer.peer);
    const auto to = static_cast<size_t>(send ? transfer.peer : transfer.stage);
    return ((transfer.is_backward() ? stages() : 0) + from) * stages() + to;
  }

  void add_channel(const Action& send) {
    auto& index = channel_of_[channel_key(send)];
    if (index == kNone) {
      index = static_cast<int>(channels_.size());
      channels_.emplace_back();
    }
  }

  const Channel& channel(const Action& transfer) const {
    const int index = channel_of_[channel_key(transfer)];
    SMP_INTERNAL_ASSERT(index != kNone, to_string(transfer), " has no send");
    return channels_[static_cast<size_t>(index)];
  }

  Channel& channel(const Action& transfer) {
    return const_cast<Channel&>(static_cast<const Walker*>(this)->channel(transfer));
  }

  bool blocked(const Action& action) const {
    if (action.is_send()) {
      return channel(action).sent() - channel(action).received == credit_;
    }
    return action.is_recv() && action.microbatch >= channel(action).sent();
  }

  void advance(int rank, const Visit& visit) {
    auto& position = positions_[static_cast<size_t>(rank)];
    const auto& actions = schedule_.actions(rank);
    for (; position < actions.size() && !blocked(actions[position]); ++position) {
      if (!done_early(actions[position])) {
        perform(rank, actions[position], visit);
      }
    }
  }

  void perform(int rank, const Action& action, const Visit& visit) {
    visit(rank, position(rank), action);
    auto& clock = clocks_[static_cast<size_t>(rank)];
    if (action.is_compute()) {
      clock += action.kind == Action::Kind::kBackward ? 2 : 1;
    } else if (action.is_transfer()) {
      auto& used = channel(action);
      if (action.is_send()) {
        used.sent_at.push_back(clock);
      } else {
        clock = std::max(clock, used.sent_at[static_cast<size_t>(used.received++)]);
      }
      wake(schedule_.rank_of(action.peer));
    }
  }

  /// How long a rank would wait for a message if it received it now.
  int wait_for(const Action& receive) const {
    const int sent_at = channel(receive).sent_at[static_cast<size_t>(receive.microbatch)];
    return std::max(0, sent_at - clocks_[static_cast<size_t>(schedule_.rank_of(receive.stage))]);
  }

  /// A receive that `receive_early` did.
  bool done_early(const Action& action) const {
    return action.is_recv() && action.microbatch < channel(action).received;
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
  std::vector<int> clocks_;        // if F = I = W = 1, for `receive_early`
  std::vector<int> channel_of_;    // channel key -> index in channels_
  std::vector<Channel> channels_;
  std::vector<int> awake_;      // ranks that may be able to go on
  std::vector<bool> is_awake_;  // whether each rank is awake
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

Schedule receive_in_time(const Schedule& schedule, int credit) {
  Schedule result(schedule.ranks(), schedule.microbatches(), schedule.rank_of_stage(),
                  schedule.backward_of_stage());
  const Visit record = [&](int rank, size_t, const Action& action) {
    result.actions(rank).push_back(action);
  };
  Walker walker(schedule, credit);
  for (walker.run(record); walker.stuck_rank() >= 0; walker.run(record)) {
    SMP_CHECK(walker.receive_early(record), walker.describe_deadlock());
  }
  return result;
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
