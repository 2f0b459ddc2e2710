// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/action.h"

namespace smp::pipeline {

/// Stage `from` sends boundary values to the later stage `to`. Skips such as 0 -> 2 are edges
/// too. The backward pass sends gradients from `to` to `from` where `needs_gradient`.
struct StageEdge {
  int from = 0;
  int to = 0;
  /// False where everything sent is without gradient (integers, detached values).
  bool needs_gradient = true;
};

/// The edges 0 -> 1 -> ... -> stages - 1.
std::vector<StageEdge> chain_edges(int stages);

/// Throws `smp::ConfigError` unless every edge goes from a stage to a later one and none appears
/// twice.
void check_edges(const std::vector<StageEdge>& edges, int stages);

/// The index of the edge that a transfer goes over, whichever way; `edges.size()` if there is none.
size_t edge_of(const Action& transfer, const std::vector<StageEdge>& edges);

/// The actions of a rank, with others inserted before those at their positions or, at their number,
/// behind them all.
std::vector<Action> inserted(const std::vector<Action>& actions,
                             const std::multimap<size_t, Action>& others);

/// The actions of each rank of a pipeline in one step, in order. Pure data: equal on all ranks,
/// printable, parsable. Whether it makes sense is for `verify` to say.
class Schedule {
 public:
  /// An empty list of actions for each of `ranks` ranks. `rank_of_stage[s]` owns stage s.
  /// `backward_of_stage[s]`: whether stage s has backwards and a reduce. In evaluation none has; in
  /// training those have none whose parameters and inputs need no gradient. Throws `smp::Error`
  /// when a number is not positive, there are more ranks than stages, a stage has no valid rank, or
  /// a list another length.
  Schedule(int ranks, int microbatches, std::vector<int> rank_of_stage,
           std::vector<bool> backward_of_stage);
  /// The same for all stages.
  Schedule(int ranks, int microbatches, std::vector<int> rank_of_stage, bool has_backward);

  int ranks() const { return static_cast<int>(actions_.size()); }
  int stages() const { return static_cast<int>(rank_of_stage_.size()); }
  int microbatches() const { return microbatches_; }
  /// Whether any stage has a backward.
  bool has_backward() const;
  bool has_backward(int stage) const { return backward_of_stage_.at(static_cast<size_t>(stage)); }
  const std::vector<bool>& backward_of_stage() const { return backward_of_stage_; }
  const std::vector<int>& rank_of_stage() const { return rank_of_stage_; }
  int rank_of(int stage) const { return rank_of_stage_.at(static_cast<size_t>(stage)); }

  const std::vector<Action>& actions(int rank) const {
    return actions_.at(static_cast<size_t>(rank));
  }
  std::vector<Action>& actions(int rank) { return actions_.at(static_cast<size_t>(rank)); }

  /// The place of an action in errors: "schedule: rank 1 at action 7 (1RECV_F2<0): ".
  std::string at(int rank, size_t position) const;

  /// The actions of all ranks.
  const std::vector<std::vector<Action>>& lists() const { return actions_; }
  std::vector<std::vector<Action>>& lists() { return actions_; }

  /// The same with empty lists.
  Schedule without_actions() const {
    return {ranks(), microbatches_, rank_of_stage_, backward_of_stage_};
  }

  friend bool operator==(const Schedule& a, const Schedule& b) {
    return a.microbatches_ == b.microbatches_ && a.rank_of_stage_ == b.rank_of_stage_ &&
           a.backward_of_stage_ == b.backward_of_stage_ && a.actions_ == b.actions_;
  }

 private:
  int microbatches_;
  std::vector<int> rank_of_stage_;
  std::vector<bool> backward_of_stage_;
  std::vector<std::vector<Action>> actions_;
};

/// A header line, then one line of actions for each rank, for example:
///
///     schedule ranks=2 microbatches=1 backward=yes rank_of_stage=0,1
///     rank 0: 0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE
///     rank 1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE
///
/// "backward=no" if no stage has a backward, "backward=1,2" if these stages have one.
std::string to_string(const Schedule& schedule);

/// For those who read schedules, before anything is computed from one: throws `smp::Error` that
/// names `where` if the action is of a stage or microbatch that the schedule does not have.
void check_action(const Schedule& schedule, const Action& action, std::string_view where);
/// The same for the schedule as a whole, if it has more stages than any pipeline, or says that it
/// is large and has few actions: who verifies it needs memory for all that it should have.
void check_size(const Schedule& schedule, std::string_view where);

/// Parses that form. Empty lines and lines that begin with '#' are skipped. Throws `smp::Error`
/// with the line and column of the first thing that does not fit.
Schedule parse_schedule(std::string_view text);

}  // namespace smp::pipeline
