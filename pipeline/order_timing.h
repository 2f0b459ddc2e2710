// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "pipeline/generators.h"

namespace smp::pipeline {

/// The computes of each rank, in order.
using ActionOrder = std::vector<std::vector<Action>>;

/// Between which stages values and gradients go, and how long they are under way. Made once, for
/// the many orders that the list scheduler tries.
class StageFlow {
 public:
  /// A stage waited for, and the time from the end of its compute to the arrival.
  struct Source {
    int stage;
    double delay;
  };

  /// `options` are checked and have `costs` that are filled.
  explicit StageFlow(const ScheduleOptions& options);

  int stages() const { return static_cast<int>(rank_of_stage_.size()); }
  int ranks() const { return static_cast<int>(stages_of_rank_.size()); }
  int microbatches() const { return microbatches_; }
  int rank_of(int stage) const { return rank_of_stage_[static_cast<size_t>(stage)]; }
  const std::vector<int>& stages_of(int rank) const {
    return stages_of_rank_[static_cast<size_t>(rank)];
  }
  const StageCosts& costs() const { return costs_; }

  /// The sources that a compute waits for: other stages' forwards or input gradients of its
  /// microbatch.
  const std::vector<Source>& sources(const Action& compute) const { return links(compute).sources; }
  /// Which stages wait for it, for the same computes.
  const std::vector<int>& targets(const Action& compute) const { return links(compute).targets; }
  /// How long its rank computes.
  double duration(const Action& compute) const { return costs_.of(compute); }
  /// How long its rank is busy sending afterwards.
  double sending(const Action& compute) const { return links(compute).sending; }

  /// Where numbers by stage and microbatch keep that of `compute`.
  size_t index(const Action& compute) const { return index(compute.stage, compute.microbatch); }
  size_t index(int stage, int microbatch) const {
    return static_cast<size_t>(stage) * static_cast<size_t>(microbatches_) +
           static_cast<size_t>(microbatch);
  }
  /// How many numbers that are.
  size_t size() const { return rank_of_stage_.size() * static_cast<size_t>(microbatches_); }

 private:
  /// A stage's sources and targets in one direction of the pass.
  struct Links {
    std::vector<Source> sources;
    std::vector<int> targets;
    double sending = 0;  // time
  };

  void add(std::vector<Links>& direction, int from, int to, double send, double latency);
  const Links& links(const Action& compute) const;

  int microbatches_;
  std::vector<int> rank_of_stage_;
  std::vector<std::vector<int>> stages_of_rank_;
  StageCosts costs_;
  std::vector<Links> forward_;   // links by stage
  std::vector<Links> backward_;  // likewise
};

/// Runs orders of computes in virtual time, as `simulate` runs the schedules that `lower` makes of
/// them.
class OrderTimer {
 public:
  explicit OrderTimer(const StageFlow& flow);

  /// The makespan; infinite if the order has a deadlock.
  double time(const ActionOrder& order);

  /// A compute and the next one of its rank, by position of the first.
  struct Neighbours {
    int rank;
    size_t position;
  };

  /// Neighbours on a critical path of the order timed last, where the second waited only for the
  /// first. That order must have a finite makespan. To make the step shorter, at least one such
  /// pair must change its order.
  std::vector<Neighbours> critical_neighbours(const ActionOrder& order) const;

 private:
  struct Times {
    double start;
    double end;  // end of the compute, without sends
  };
  /// When the result of a compute was ready, and where in the list of its rank it was.
  struct Made {
    double end;
    size_t position;
  };

  const std::vector<Made>& made_by(const Action& compute) const {
    return compute.kind == Action::Kind::kForward ? forwards_ : gradients_;
  }
  bool is_ready(const Action& compute) const;
  double arrival(const Action& compute, const StageFlow::Source& source) const;
  void advance(const ActionOrder& order, int rank);
  void wake(int rank);

  const StageFlow& flow_;
  std::vector<Made> forwards_;   // forwards by stage and microbatch; end < 0: not yet
  std::vector<Made> gradients_;  // likewise, of the inputs
  std::vector<std::vector<Times>> times_;
  std::vector<double> clocks_;  // time of each rank
  std::vector<int> awake_;      // ranks that may be able to go on
  std::vector<bool> is_awake_;  // state of each rank
};

}  // namespace smp::pipeline
