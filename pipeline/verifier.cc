// SPDX-License-Identifier: Apache-2.0
#include "pipeline/verifier.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "core/check.h"
#include "pipeline/frame.h"
#include "pipeline/walk.h"

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;

class ScheduleVerifier {
 public:
  ScheduleVerifier(const Schedule& schedule, const std::vector<StageEdge>& edges)
      : schedule_(schedule),
        edges_(edges),
        edge_of_(stages() * stages(), kNone),
        in_edges_(stages()),
        out_edges_(stages()) {
    for (size_t i = 0; i < edges.size(); ++i) {
      const auto from = static_cast<size_t>(edges[i].from);
      const auto to = static_cast<size_t>(edges[i].to);
      edge_of_[from * stages() + to] = static_cast<int>(i);
      in_edges_[to].push_back(edges[i]);
      out_edges_[from].push_back(edges[i]);
    }
    // Four computes and one reduce for each stage, two ends in two directions for each edge.
    positions_.resize(4 * (stages() + edges.size()) * microbatches() + stages(), kNone);
  }

  void check_actions() {
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      const auto& actions = schedule_.actions(rank);
      for (size_t i = 0; i < actions.size(); ++i) {
        const auto reason = malformed(rank, actions[i]);
        SMP_CHECK(reason.empty(), at(rank, i), reason);
        if (actions[i].is_added()) continue;
        auto& position = positions_[index_of(actions[i])];
        SMP_CHECK(position == kNone, at(rank, i), "it was already done at action ", position,
                  ". Every action of a step happens exactly once.");
        position = static_cast<int>(i);
      }
    }
  }

  void check_complete() const {
    for (int stage = 0; stage < schedule_.stages(); ++stage) {
      for (int m = 0; m < schedule_.microbatches(); ++m) {
        check_present(forward_of(stage, m));
        if (schedule_.has_backward(stage)) {
          check_backward(stage, m);
        }
      }
      if (schedule_.has_backward(stage)) {
        check_present(reduce_of(stage));
      }
    }
    for (const auto& edge : edges_) {
      check_backwards_of(edge);
      for (int m = 0; m < schedule_.microbatches() && crosses_ranks(edge); ++m) {
        check_pair(send_forward(edge.from, m, edge.to));
        if (schedule_.has_backward() && edge.needs_gradient) {
          check_pair(send_backward(edge.to, m, edge.from));
        }
      }
    }
  }

  void check_order(int active_microbatches) const {
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      const auto& actions = schedule_.actions(rank);
      for (size_t i = 0; i < actions.size(); ++i) {
        check_requirements(rank, i, actions[i]);
      }
      if (active_microbatches > 0 && schedule_.has_backward()) {
        check_in_flight(rank, active_microbatches);
      }
    }
  }

  /// `costs` are filled.
  void check_memory(const StageCosts& costs, const std::vector<double>& limits) const {
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      const double limit = limits.at(static_cast<size_t>(rank));
      KeptMemory kept(costs);
      size_t most = 0;
      const auto& actions = schedule_.actions(rank);
      for (size_t i = 0; i < actions.size(); ++i) {
        const double before = kept.peak();
        if (schedule_.has_backward(actions[i].stage)) kept.add(actions[i]);
        if (kept.peak() > before) most = i;
      }
      SMP_CHECK_WITH(PartitionError, kept.peak() <= limit * (1 + kRounding), at(rank, most),
                     "makes the rank keep ", fmt::format("{}", kept.peak()),
                     ", memory_limit allows ", fmt::format("{}", limit),
                     ". Run a backward first, or raise memory_limit.");
    }
  }

 private:
  static constexpr int kNone = -1;

  size_t stages() const { return static_cast<size_t>(schedule_.stages()); }
  size_t microbatches() const { return static_cast<size_t>(schedule_.microbatches()); }
  bool is_stage(int stage) const { return stage >= 0 && stage < schedule_.stages(); }
  bool crosses_ranks(const StageEdge& edge) const {
    return schedule_.rank_of(edge.from) != schedule_.rank_of(edge.to);
  }

  std::string at(int rank, size_t position) const { return schedule_.at(rank, position); }

  std::string malformed(int rank, const Action& action) const {
    const int stage = action.stage;
    if (!is_stage(stage)) {
      return c10::str("there is no stage ", stage, ", expected 0 to ", stages() - 1, ".");
    }
    if (schedule_.rank_of(stage) != rank && action.kind != Kind::kOutputs) {
      return c10::str("stage ", stage, " belongs to rank ", schedule_.rank_of(stage),
                      ". Move the action there.");
    }
    if (!action.is_of_stage() &&
        (action.microbatch < 0 || action.microbatch >= schedule_.microbatches())) {
      return c10::str("there is no microbatch ", action.microbatch, ", expected 0 to ",
                      microbatches() - 1, ".");
    }
    const bool is_of_backward =
        action.is_backward() || action.kind == Kind::kReduce || action.kind == Kind::kRecall;
    if (is_of_backward && !schedule_.has_backward(stage)) {
      return schedule_.has_backward()
                 ? c10::str("stage ", stage,
                            " has no backward, expected its forwards and their transfers only.")
                 : "the schedule says backward=no, expected forwards and their transfers only.";
    }
    if (action.is_copy() && (!is_stage(action.peer) || schedule_.rank_of(action.peer) == rank)) {
      return c10::str("stage ", action.peer, " is not on another rank, expected one that is.");
    }
    return action.is_transfer() ? malformed_transfer(action) : "";
  }

  std::string malformed_transfer(const Action& action) const {
    // A send forward and a receive backward are at the beginning of their edge.
    const bool at_start = action.is_send() != action.is_backward();
    const int from = at_start ? action.stage : action.peer;
    const int to = at_start ? action.peer : action.stage;
    const int edge = is_stage(action.peer) ? edge_index(from, to) : kNone;
    if (edge == kNone) {
      return c10::str("stage ", from, " sends no values to stage ", to,
                      ". Transfers go along the edges between stages.");
    }
    const auto& found = edges_[static_cast<size_t>(edge)];
    if (action.is_backward() && !found.needs_gradient) {
      return c10::str("the values from stage ", from, " to stage ", to, " have no gradient.");
    }
    if (!crosses_ranks(found)) {
      return c10::str("stages ", from, " and ", to, " are on the same rank and need no transfer.");
    }
    return "";
  }

  int edge_index(int from, int to) const {
    return edge_of_[static_cast<size_t>(from) * stages() + static_cast<size_t>(to)];
  }

  /// Where in `positions_` a well-formed action is.
  size_t index_of(const Action& action) const {
    const auto stage = static_cast<size_t>(action.stage);
    if (action.kind == Kind::kReduce) {
      return positions_.size() - stages() + stage;
    }
    size_t row = 4 * stage + static_cast<size_t>(action.kind);
    if (action.is_transfer()) {
      const int edge =
          edge_index(std::min(action.stage, action.peer), std::max(action.stage, action.peer));
      row = 4 * (stages() + static_cast<size_t>(edge)) + (action.is_backward() ? 2 : 0) +
            (action.is_recv() ? 1 : 0);
    }
    return row * microbatches() + static_cast<size_t>(action.microbatch);
  }

  int position_of(const Action& action) const { return positions_[index_of(action)]; }
  bool happens(const Action& action) const { return position_of(action) != kNone; }
  bool splits(int stage, int m) const { return happens(backward_input_of(stage, m)); }

  /// The action that makes the gradients that the stage sends back, and the one that completes its
  /// parameters'.
  Action input_gradients_of(int stage, int m) const {
    return splits(stage, m) ? backward_input_of(stage, m) : backward_of(stage, m);
  }
  Action weight_gradients_of(int stage, int m) const {
    return splits(stage, m) ? backward_weight_of(stage, m) : backward_of(stage, m);
  }

  /// Either whole or in two halves.
  void check_backward(int stage, int m) const {
    const auto whole = backward_of(stage, m);
    const auto input = backward_input_of(stage, m);
    const auto weight = backward_weight_of(stage, m);
    if (!happens(input) && !happens(weight)) {
      check_present(whole);
      return;
    }
    const int rank = schedule_.rank_of(stage);
    const auto half = happens(input) ? input : weight;
    SMP_CHECK(!happens(whole), at(rank, static_cast<size_t>(position_of(half))),
              "half a backward beside the whole one, ", to_string(whole), " (action ",
              position_of(whole), "). A backward is either whole (B) or split (I, later W).");
    const auto other = happens(input) ? weight : input;
    SMP_CHECK(happens(other), "schedule: rank ", rank, " never does ", to_string(other),
              ", the other half of ", to_string(half), " (action ", position_of(half),
              "). A backward is either whole (B) or split (I, later W).");
  }

  /// Gradients go from a backward to a backward.
  void check_backwards_of(const StageEdge& edge) const {
    if (!schedule_.has_backward() || !edge.needs_gradient) {
      return;
    }
    for (const int stage : {edge.from, edge.to}) {
      SMP_CHECK(schedule_.has_backward(stage), "schedule: stage ", stage,
                " has no backward, but gradients go from stage ", edge.to, " to stage ", edge.from,
                ". Give it one.");
    }
  }

  void check_present(const Action& action) const {
    const int rank = schedule_.rank_of(action.stage);
    SMP_CHECK(happens(action), "schedule: rank ", rank, " never does ", to_string(action),
              " in its ", schedule_.actions(rank).size(),
              " actions. Every action of a step happens exactly once.");
  }

  /// A send and its receive.
  void check_pair(const Action& send) const {
    const auto recv = counterpart(send);
    check_half(send, recv, "receives that at action ");
    check_half(recv, send, "sends that at action ");
  }

  void check_half(const Action& action, const Action& other, const char* what_other_does) const {
    if (happens(action)) {
      return;
    }
    const int position = position_of(other);
    const int other_rank = schedule_.rank_of(other.stage);
    SMP_CHECK(position == kNone, "schedule: rank ", schedule_.rank_of(action.stage), " never does ",
              to_string(action), ", but rank ", other_rank, " ", what_other_does, position, " (",
              to_string(other), "). Every send has exactly one receive.");
    check_present(action);
  }

  void check_requirements(int rank, size_t position, const Action& action) const {
    const auto require = [&](const Action& earlier, const char* why) {
      const int found = position_of(earlier);
      SMP_CHECK(found < static_cast<int>(position), at(rank, position), "comes before ",
                to_string(earlier), " (action ", found, "): ", why);
    };
    const int stage = action.stage;
    const int m = action.microbatch;
    switch (action.kind) {
      case Kind::kForward:
        require_inputs(action, require);
        break;
      case Kind::kBackward:
        require_gradients(action, require);
        require_weights_in_order(action, require);
        break;
      case Kind::kBackwardInput:
        require_gradients(action, require);
        break;
      case Kind::kBackwardWeight:
        require(backward_input_of(stage, m), "the weight half uses what the input half made.");
        require_weights_in_order(action, require);
        break;
      case Kind::kSendForward:
        require(forward_of(stage, m), "a stage sends what its forward made.");
        require_in_order(action, require);
        break;
      case Kind::kSendBackward:
        require(input_gradients_of(stage, m), "a stage sends what its backward made.");
        require_in_order(action, require);
        break;
      case Kind::kReduce:
        require(weight_gradients_of(stage, schedule_.microbatches() - 1),
                "gradients are reduced when all microbatches are added.");
        break;
      case Kind::kRecvForward:
      case Kind::kRecvBackward:
        require_in_order(action, require);
        break;  // Its send is on another rank: the walk's business.
      case Kind::kRecall:
      case Kind::kSendCopy:
      case Kind::kRecvCopy:
      case Kind::kOutputs:
        break;  // see `verify_frame`
      case Kind::kUnshard:
      case Kind::kReshard:
        break;  // see `verify_unsharding`
    }
  }

  static constexpr const char* kAscending =
      "a stage runs its microbatches in ascending order, so that sums have one order.";

  template <class Require>
  void require_inputs(const Action& forward, const Require& require) const {
    const int stage = forward.stage;
    const int m = forward.microbatch;
    if (m > 0) {
      require(forward_of(stage, m - 1), kAscending);
    }
    for (const auto& edge : in_edges_[static_cast<size_t>(stage)]) {
      require(crosses_ranks(edge) ? recv_forward(stage, m, edge.from) : forward_of(edge.from, m),
              "a forward uses the values of earlier stages.");
    }
  }

  /// Checks the gradients of a whole backward or the first half of one.
  template <class Require>
  void require_gradients(const Action& backward, const Require& require) const {
    const int stage = backward.stage;
    const int m = backward.microbatch;
    require(forward_of(stage, m), "a backward uses what its forward saved.");
    if (m > 0) {
      require(input_gradients_of(stage, m - 1), kAscending);
    }
    for (const auto& edge : out_edges_[static_cast<size_t>(stage)]) {
      if (edge.needs_gradient) {
        require(
            crosses_ranks(edge) ? recv_backward(stage, m, edge.to) : input_gradients_of(edge.to, m),
            "a backward uses the gradients of later stages.");
      }
    }
  }

  template <class Require>
  void require_weights_in_order(const Action& backward, const Require& require) const {
    if (backward.microbatch > 0) {
      require(weight_gradients_of(backward.stage, backward.microbatch - 1), kAscending);
    }
  }

  /// The messages of a channel carry no number: the first that is sent is the first received.
  template <class Require>
  void require_in_order(const Action& transfer, const Require& require) const {
    if (transfer.microbatch > 0) {
      auto before = transfer;
      --before.microbatch;
      require(before, "the messages of a channel are sent and received in ascending order.");
    }
  }

  /// Microbatches begin and finish in order, so two counts say how many are in flight. A stage
  /// without a backward is finished with its forward.
  void check_in_flight(int rank, int bound) const {
    std::vector<int> stages_of_rank;
    for (int stage = 0; stage < schedule_.stages(); ++stage) {
      if (schedule_.rank_of(stage) == rank) {
        stages_of_rank.push_back(stage);
      }
    }
    std::vector<int> finished_by_stage(stages(), 0);
    int begun = 0;
    int finished = 0;
    const auto& actions = schedule_.actions(rank);
    for (size_t i = 0; i < actions.size(); ++i) {
      const bool forward = actions[i].kind == Kind::kForward;
      if (forward) {
        begun = std::max(begun, actions[i].microbatch + 1);
        SMP_CHECK(begun - finished <= bound, at(rank, i), "makes ", begun - finished,
                  " microbatches in flight, active_microbatches allows ", bound,
                  ". Run a backward first, or raise active_microbatches.");
      }
      if (actions[i].makes_weight_gradients() ||
          (forward && !schedule_.has_backward(actions[i].stage))) {
        finished_by_stage[static_cast<size_t>(actions[i].stage)] = actions[i].microbatch + 1;
        finished = schedule_.microbatches();
        for (const int stage : stages_of_rank) {
          finished = std::min(finished, finished_by_stage[static_cast<size_t>(stage)]);
        }
      }
    }
  }

  const Schedule& schedule_;
  const std::vector<StageEdge>& edges_;
  std::vector<int> edge_of_;  // from * stages + to -> index in edges_
  std::vector<std::vector<StageEdge>> in_edges_;
  std::vector<std::vector<StageEdge>> out_edges_;
  std::vector<int> positions_;  // positions of every possible action in the list of its rank
};

}  // namespace

void verify(const Schedule& schedule, const std::vector<StageEdge>& edges,
            const VerifyOptions& options) {
  check_edges(edges, schedule.stages());
  ScheduleVerifier verifier(schedule, edges);
  verifier.check_actions();
  verifier.check_complete();
  verifier.check_order(options.active_microbatches());
  verify_frame(schedule);
  if (!options.memory_limit().empty()) {
    const auto costs = options.costs().filled(schedule.rank_of_stage().size(), edges.size());
    verifier.check_memory(costs, options.memory_limit());
  }
  walk(schedule, options.credit(), [](int, size_t, const Action&) {});
}

}  // namespace smp::pipeline
