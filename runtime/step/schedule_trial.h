// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "pipeline/costs.h"
#include "pipeline/generators.h"
#include "pipeline/ranking.h"
#include "pipeline/timeline.h"

namespace smp::runtime {

/// How `"pipeline": "auto"` finds its schedule in the first steps of training: which one runs next,
/// and the conclusions from the records. A pure state machine: every rank has one, tells it the
/// same, and so comes to the same schedule. Internal.
///
/// 1. The choice by the predicted costs runs.
/// 2. The same with its backwards the other way round (`pipeline::exchange_backwards`) runs. All
///    schedules are then ranked by the measured costs. If the first is not as good as the best of
///    them (`pipeline::ScheduleRanking::kAlike`), the choice among them takes over.
/// 3. That one runs. If its steps are not as good as those of the first, that one returns.
class ScheduleTrial {
 public:
  /// Steps of each part that warm caches and memory, and then those that are recorded.
  static constexpr int kWarmSteps = 1;
  static constexpr int kRecordedSteps = 3;

  /// `options`: the pipeline with its costs as predicted, in us; `predicted`: the choice by them.
  ScheduleTrial(pipeline::ScheduleOptions options, pipeline::RankedSchedule predicted);

  /// The schedule of the next step, and how it is expected to run.
  const pipeline::RankedSchedule& current() const { return current_; }
  /// Whether `current` stays. Nothing more is to be recorded.
  bool is_over() const { return part_ == Part::kOver; }

  /// Takes the recorded steps of `current`, by stages, and goes on to the next part.
  void learn(pipeline::Timeline recorded);

  /// When it is over, for people: the schedules by measured costs, which one stays and why, and of
  /// the one that ran last the predicted and the measured idle time of each rank.
  std::string report() const;

 private:
  enum class Part { kPredicted, kExchanged, kChosen, kOver };

  void exchange();
  void choose();
  void settle();

  pipeline::ScheduleOptions options_;
  const pipeline::RankedSchedule first_;
  pipeline::RankedSchedule current_;
  Part part_ = Part::kPredicted;
  std::vector<pipeline::Timeline> recorded_;  // timelines by part
  pipeline::ScheduleRanking ranking_;         // ranking by measured costs
  std::string verdict_;
};

}  // namespace smp::runtime
