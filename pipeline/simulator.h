#pragma once

#include <string>
#include <vector>

#include "pipeline/schedule.h"

namespace smp::pipeline {

/// What things take, in any one unit of time.
struct StageCosts {
  /// Every forward and backward takes 1, transfers take nothing: the slots of the generators.
  static StageCosts unit(int stages);

  /// Time of one microbatch's forward, by stage.
  std::vector<double> forward;
  /// Time of one microbatch's backward, by stage.
  std::vector<double> backward;
  /// Time from a send to the arrival, by edge in the order of the edges given to `simulate` and
  /// in both directions; empty for none.
  std::vector<double> latency;
};

/// An action and when its rank was at it. A receive lasts as long as its rank waits.
struct TimedAction {
  Action action;
  double start = 0;
  double end = 0;
};

/// A step as it would run.
struct Simulation {
  /// From the start of the step to the end of its last action.
  double makespan = 0;
  /// By rank: time in forwards and backwards.
  std::vector<double> busy;
  /// By rank: makespan - busy.
  std::vector<double> idle;
  /// By stage: the most microbatches whose forward was run and whose backward was not. Without
  /// backward nothing is kept, so it is 0.
  std::vector<int> peak_in_flight;
  /// By rank: all actions, in order.
  std::vector<std::vector<TimedAction>> timeline;

  /// Idle part of all the ranks' time, between 0 and 1.
  double bubble() const;
};

/// Runs the schedule in virtual time: computes take what `costs` says, sends never wait, a
/// message arrives `latency` after its send, reduces take nothing. Throws `smp::Error` when
/// `verify` does (with channels large enough for everything), or when `costs` do not fit.
Simulation simulate(const Schedule& schedule, const std::vector<StageEdge>& edges,
                    const StageCosts& costs);

/// A picture, one line for each rank and one cell for each slot of `slot` units of time:
///
///     rank 0 F0 F1 .  B0 B1
///     rank 1 .  F0 B0 F1 B1
///
/// A cell shows what the rank computes in the middle of the slot, "." for nothing and "-" where
/// the action of the cell before goes on. Stages are shown too ("2F0") when a rank has several.
std::string draw(const Simulation& simulation, double slot = 1.0);

}  // namespace smp::pipeline
