// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pipeline/generators.h"
#include "pipeline/verifier.h"
#include "tests/pipeline/schedule_helpers.h"

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;

/// Runs a schedule as ranks would, with queues for channels, and knows nothing of the verifier: is
/// everything there when it is used, is each gradient added once and in order, is nothing missing
/// or left over at the end?
class Interpreter {
 public:
  Interpreter(const Schedule& schedule, const std::vector<StageEdge>& edges, int credit)
      : schedule_(schedule), edges_(edges), credit_(credit) {}

  bool runs_right() {
    std::vector<size_t> positions(static_cast<size_t>(schedule_.ranks()), 0);
    for (bool progress = true; progress && !wrong_;) {
      progress = false;
      for (int rank = 0; rank < schedule_.ranks(); ++rank) {
        auto& position = positions[static_cast<size_t>(rank)];
        const auto& actions = schedule_.actions(rank);
        while (position < actions.size() && !wrong_ && !waits(actions[position])) {
          perform(rank, actions[position++]);
          progress = true;
        }
      }
    }
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      if (positions[static_cast<size_t>(rank)] < schedule_.actions(rank).size()) wrong_ = true;
    }
    return !wrong_ && is_complete();
  }

 private:
  /// From one stage to another, one direction of the pass.
  using Channel = std::pair<int, int>;

  static Channel channel_of(const Action& transfer) {
    return transfer.is_send() ? Channel(transfer.stage, transfer.peer)
                              : Channel(transfer.peer, transfer.stage);
  }

  bool waits(const Action& action) {
    if (!action.is_transfer()) return false;
    const auto& queue = queues_[channel_of(action)];
    return action.is_send() ? static_cast<int>(queue.size()) == credit_ : queue.empty();
  }

  void require(bool condition) { wrong_ = wrong_ || !condition; }

  bool is_stage(int stage) const { return stage >= 0 && stage < schedule_.stages(); }

  const StageEdge* edge(int from, int to) const {
    for (const auto& edge : edges_) {
      if (edge.from == from && edge.to == to) return &edge;
    }
    return nullptr;
  }

  /// Whether the result of one stage is at another one's disposal.
  bool has(int stage, int m, int source, bool backward) const {
    const auto& made = backward ? gradients_ : values_;
    return schedule_.rank_of(stage) == schedule_.rank_of(source)
               ? made.count({source, m}) > 0
               : arrived_.count({source, stage, m}) > 0;
  }

  void perform(int rank, const Action& action) {
    if (!is_stage(action.stage) || schedule_.rank_of(action.stage) != rank ||
        (action.kind != Kind::kReduce &&
         (action.microbatch < 0 || action.microbatch >= schedule_.microbatches()))) {
      wrong_ = true;
    } else if (action.is_transfer()) {
      transfer(action);
    } else if (action.kind == Kind::kReduce) {
      require(schedule_.has_backward() && sums_[action.stage] == schedule_.microbatches());
      require(reduced_.insert(action.stage).second);
    } else {
      compute(action);
    }
  }

  void transfer(const Action& action) {
    const int from = action.is_backward() ? channel_of(action).second : channel_of(action).first;
    const int to = action.is_backward() ? channel_of(action).first : channel_of(action).second;
    const auto* found = edge(from, to);
    if (!found || schedule_.rank_of(from) == schedule_.rank_of(to) ||
        (action.is_backward() && (!found->needs_gradient || !schedule_.has_backward()))) {
      wrong_ = true;
      return;
    }
    auto& queue = queues_[channel_of(action)];
    if (action.is_send()) {
      const auto& made = action.is_backward() ? gradients_ : values_;
      require(made.count({action.stage, action.microbatch}) > 0);
      require(sent_[channel_of(action)]++ == action.microbatch);
      queue.push_back(action.microbatch);
    } else {
      require(queue.front() == action.microbatch);
      queue.erase(queue.begin());
      require(arrived_.insert({action.peer, action.stage, action.microbatch}).second);
    }
  }

  void compute(const Action& action) {
    const int stage = action.stage;
    const int m = action.microbatch;
    if (action.kind == Kind::kForward) {
      require(forwards_[stage]++ == m);
      for (const auto& edge : edges_) {
        if (edge.to == stage) require(has(stage, m, edge.from, false));
      }
      values_.insert({stage, m});
      return;
    }
    require(schedule_.has_backward());
    if (action.makes_input_gradients()) {
      require(values_.count({stage, m}) > 0 && inputs_[stage]++ == m);
      for (const auto& edge : edges_) {
        if (edge.from == stage && edge.needs_gradient) require(has(stage, m, edge.to, true));
      }
      gradients_.insert({stage, m});
    }
    if (action.makes_weight_gradients()) {
      require(gradients_.count({stage, m}) > 0 && sums_[stage]++ == m);
      const bool split = action.kind == Kind::kBackwardWeight;
      require(split == (halves_.count({stage, m}) > 0));
    } else {
      halves_.insert({stage, m});
    }
  }

  bool is_complete() {
    const int m = schedule_.microbatches();
    const int backwards = schedule_.has_backward() ? m : 0;
    for (int stage = 0; stage < schedule_.stages(); ++stage) {
      if (forwards_[stage] != m || inputs_[stage] != backwards || sums_[stage] != backwards ||
          reduced_.count(stage) != (schedule_.has_backward() ? 1 : 0)) {
        return false;
      }
    }
    for (const auto& edge : edges_) {
      const bool crosses = schedule_.rank_of(edge.from) != schedule_.rank_of(edge.to);
      if (sent_[{edge.from, edge.to}] != (crosses ? m : 0) ||
          sent_[{edge.to, edge.from}] != (crosses && edge.needs_gradient ? backwards : 0)) {
        return false;
      }
    }
    return std::all_of(queues_.begin(), queues_.end(),
                       [](const auto& queue) { return queue.second.empty(); });
  }

  const Schedule& schedule_;
  const std::vector<StageEdge>& edges_;
  const int credit_;
  bool wrong_ = false;
  std::map<Channel, std::vector<int>> queues_;
  std::map<Channel, int> sent_;
  std::set<std::tuple<int, int, int>> arrived_;  // from stage, at stage, microbatch
  std::set<std::pair<int, int>> values_;         // made by a stage, of a microbatch
  std::set<std::pair<int, int>> gradients_;      // likewise
  std::set<std::pair<int, int>> halves_;         // backwards of which only the first half was run
  std::map<int, int> forwards_;                  // forwards by stage
  std::map<int, int> inputs_;
  std::map<int, int> sums_;
  std::set<int> reduced_;
};

/// Changes one thing at random.
class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  /// Mutates and returns words for it, for the message of a failure.
  std::string mutate(Schedule& schedule) {
    const int rank = below(schedule.ranks());
    auto& list = schedule.actions(rank);
    if (list.empty()) return "nothing";
    const int position = below(static_cast<int>(list.size()));
    const auto at = list.begin() + position;
    const Action action = *at;
    const auto what = c10::str("rank ", rank, " action ", position, " (", to_string(action), ") ");
    switch (below(7)) {
      case 0:
        std::iter_swap(at, list.begin() + below(static_cast<int>(list.size())));
        return what + "swapped";
      case 1:
        list.erase(at);
        return what + "deleted";
      case 2:
        insert(list, action);
        return what + "duplicated";
      case 3:
        list.erase(at);
        insert(list, action);
        return what + "moved";
      case 4:
        list.erase(at);
        insert(schedule.actions(below(schedule.ranks())), action);
        return what + "moved to another rank";
      case 5:
        at->kind = static_cast<Kind>(below(static_cast<int>(Kind::kReduce) + 1));
        return what + "of another kind";
      default:
        if (position + 1 < static_cast<int>(list.size())) std::iter_swap(at, at + 1);
        return what + "swapped with the next";
    }
  }

 private:
  int below(int end) { return std::uniform_int_distribution<int>(0, end - 1)(random_); }
  void insert(std::vector<Action>& list, const Action& action) {
    list.insert(list.begin() + below(static_cast<int>(list.size()) + 1), action);
  }

  std::mt19937 random_;
};

TEST(Mutations, AreRejectedWithTheReasonOrStillRight) {
  Mutator mutator(20261121);
  for (const auto& kind : schedule_kinds()) {
    const auto options = pipeline_for(kind);
    int right = 0;
    int wrong = 0;
    const auto good = lower(kind.generate(options), options.edges());
    for (const int credit : {required_credit(good, options.edges()), options.microbatches()}) {
      EXPECT_TRUE(Interpreter(good, options.edges(), credit).runs_right()) << kind.name;
      for (int trial = 0; trial < 500; ++trial) {
        auto schedule = good;
        std::string what = mutator.mutate(schedule);
        if (trial % 3 == 0) what += ", " + mutator.mutate(schedule);
        const auto error = verify_error(schedule, options.edges(), VerifyOptions().credit(credit));
        const bool runs = Interpreter(schedule, options.edges(), credit).runs_right();
        ASSERT_EQ(error.empty(), runs) << kind.name << ", " << what << ": " << error << '\n'
                                       << to_string(schedule);
        ++(runs ? right : wrong);
        // The reason names a rank and an action.
        if (!runs) {
          EXPECT_NE(error.find("rank "), std::string::npos) << error;
          EXPECT_NE(error.find_first_of("FBIWR", error.find("rank ")), std::string::npos) << error;
        }
      }
    }
    EXPECT_GT(right, 20) << kind.name;
    EXPECT_GT(wrong, 500) << kind.name;
  }
}

}  // namespace
}  // namespace smp::pipeline
