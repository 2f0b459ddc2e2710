// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pipeline/generators.h"
#include "pipeline/order_timing.h"

namespace smp::pipeline {

/// The memory that a rank may keep, with a margin for rounding; infinity: all.
double memory_limit_of(const ScheduleOptions& options, int rank);

/// The most that a microbatch keeps on a stage, from its forward to the end of its backward or,
/// where that is split, of the first half.
double kept_by_one(const StageCosts& costs, int stage, bool split);

/// How to choose among actions that a rank could do.
struct DispatchRule {
  bool backward_first;
  /// How many microbatches a rank may have in flight beyond those that keep it busy.
  int extra_in_flight;
  /// How long to wait for a better action, as part of the time until the first could be done: with
  /// 0 a rank never waits when it could work, with 1 the order is active (Giffler and Thompson).
  double look_ahead;
  /// Microbatches that go through a rank's stages together.
  int round;
  /// How many microbatches a rank may have in flight, whatever keeps it busy; 0: no such limit.
  int in_flight = 0;
  /// When a rank does backwards: as soon as they are ready, when it has done all its forwards, or
  /// never.
  enum class Backwards { kWhenReady, kAfterForwards, kNone };
  Backwards backwards = Backwards::kWhenReady;
};

/// Runs all ranks in virtual time and gives each its next action by a rule; with `split`, backwards
/// are two actions.
ActionOrder dispatch(const StageFlow& flow, const ScheduleOptions& options, bool split,
                     const DispatchRule& rule);

}  // namespace smp::pipeline
