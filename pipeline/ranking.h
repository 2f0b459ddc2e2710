// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "pipeline/generators.h"
#include "pipeline/simulator.h"

namespace smp::pipeline {

/// A schedule, with its transfers, and how it would run.
struct RankedSchedule {
  std::string name;
  Schedule schedule;
  Simulation simulation;
};

/// All schedules for a pipeline, compared.
struct ScheduleRanking {
  /// One that does not come into question, and why, as a clause without a full stop.
  struct Refused {
    std::string name;
    std::string reason;
  };

  /// The shortest step first; of equals the one that keeps less, then the one documented first.
  std::vector<RankedSchedule> schedules;
  std::vector<Refused> refused;

  const RankedSchedule& best() const { return schedules.front(); }

  /// A step that is longer by this part is as good: times are not known better.
  static constexpr double kAlike = 0.02;
  /// The one to run: of those as good as the best the one that keeps least.
  const RankedSchedule& choice() const;
};

/// When to make a `list`, which takes longer than all others together.
enum class ListSearch {
  kAlways,
  kIfNothingElseFits,
};

/// Makes every schedule that has a backward for `options`, and simulates it with their costs. Those
/// that need the stages elsewhere, whose costs are not known, or that keep more than the memory
/// limit are refused. Throws `smp::ConfigError` when options are out of range, and
/// `smp::PartitionError` when the memory limit of a rank does not hold even one microbatch.
///
/// A pure function: the same on every rank that is given the same numbers.
ScheduleRanking rank_schedules(const ScheduleOptions& options,
                               ListSearch search = ListSearch::kAlways);

/// A report: a line for each schedule with its makespan, the idle part of it and the most that a
/// rank keeps; then the idle time of each rank under the choice, and the refused ones.
std::string to_string(const ScheduleRanking& ranking);

}  // namespace smp::pipeline
