// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "pipeline/costs.h"
#include "pipeline/schedule.h"

namespace smp::pipeline {

/// An action and when its rank was at it. A receive lasts as long as its rank waits.
struct TimedAction {
  Action action;
  double start = 0;
  double end = 0;
  /// The memory that the rank keeps for backwards after it.
  double memory = 0;
};

/// A step as it would run.
struct Simulation {
  /// From the start of the step to the end of its last action.
  double makespan = 0;
  /// Time of each rank in computes and sends.
  std::vector<double> busy;
  /// Idle time of each rank: makespan - busy.
  std::vector<double> idle;
  /// The most memory that each rank keeps at a time, of `costs.kept`.
  std::vector<double> peak_memory;
  /// All actions of each rank, in order.
  std::vector<std::vector<TimedAction>> timeline;

  /// Idle part of all the ranks' time, between 0 and 1.
  double bubble() const;
};

/// Runs the schedule in virtual time: computes and sends take the time in `costs`, sends do not
/// wait, a message arrives `latency` after its send, reduces take nothing. Throws `smp::Error` when
/// `verify` does (with channels large enough for everything, and with `memory_limit`), and
/// `smp::ConfigError` when `costs` do not fit or have no halves for a backward that is split.
Simulation simulate(const Schedule& schedule, const std::vector<StageEdge>& edges,
                    const StageCosts& costs, const std::vector<double>& memory_limit = {});

/// A picture, one line for each rank and one cell for each slot of `slot` units of time:
///
///     rank 0 F0 F1 .  B0 B1
///     rank 1 .  F0 B0 F1 B1
///
/// A cell shows the rank's action in the middle of the slot, "." for nothing and "-" where the
/// action of the cell before goes on. Stages are shown too ("2F0") when a rank has several.
std::string draw(const Simulation& simulation, double slot = 1.0);

}  // namespace smp::pipeline
