// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "partitioner/plan.h"
#include "pipeline/executor.h"
#include "runtime/runtime.h"
#include "runtime/step/pipeline_choice.h"
#include "runtime/step/schedule_trial.h"
#include "runtime/step/step_recording.h"

namespace smp::runtime {

/// Runs the steps of a program on this rank: under its schedule, or with `"pipeline": "auto"` under
/// those that a `ScheduleTrial` tries until it has found the best. Records steps for that and for
/// the configuration's `timeline`. Internal.
///
/// Replicas try the same schedules, and record, in the same steps, so that their measurements can
/// be put together. They may run different programs (graphs) in a step, which then does not count;
/// to find out, replicas tell each other their program, until the timeline is complete and for a
/// trial in the first steps of training (`Execution::trial_steps`). A schedule that is not decided
/// by then stays as it is.
///
/// Schedules are those of stages, also where these run unit by unit (`StepUnits`). For the trial,
/// records of units are put together by stages.
class ScheduleRunner {
 public:
  /// `graph`, in the plan's order, `plan`, `runtime` and what `setup` refers to outlive it.
  /// Collective over the pipeline.
  ScheduleRunner(Runtime& runtime, const graph::Graph& graph, const partitioner::Plan& plan,
                 PlannedStep step, pipeline::Executor::Setup setup);

  /// Runs a step, and has it observed by those that look at all steps, too.
  pipeline::StepResults run(pipeline::Executor::Step step);

  /// Before a step: whether it is recorded. Collective over the replicas in the first steps.
  bool begin_step() { return records_ = begin_recording(); }
  /// After it: the reductions meanwhile, if they are recorded. In the steps that end a part of a
  /// trial or the timeline collective over the world.
  void end_step(std::vector<pipeline::ReductionRecord> reductions);

  /// The schedule's name and numbers, and `Executor::describe`.
  std::string describe() const { return title() + "\n" + executor_->describe(unwritten()); }

  const pipeline::Schedule& schedule() const { return executor_->schedule(); }
  /// The graph in stages, for as long as this lives.
  const pipeline::PartitionedGraph& partitioned() const { return partitioned_; }

  /// The stages of this rank, by number.
  const auto& stages() const { return executor_->stages(); }

 private:
  bool is_auto() const;
  void use(const pipeline::RankedSchedule& of_stages);
  std::set<graph::ValueId> unwritten() const;
  void record();
  bool begin_recording();
  bool replicas_are_together();
  bool goes_on(const pipeline::Timeline& recorded);
  std::string title() const;

  Runtime& runtime_;
  const graph::Graph& graph_;
  const std::vector<pipeline::Edge> edges_;
  const std::optional<StepUnits> units_;  // null: stages run whole
  const pipeline::PartitionedGraph partitioned_;
  const pipeline::Executor::Setup setup_;
  std::string identity_;  // identity of the program, the same in all replicas
  std::string name_;      // name of the schedule
  pipeline::Simulation predicted_;
  std::unique_ptr<pipeline::Executor> executor_;
  std::unique_ptr<ScheduleTrial> trial_;      // null when it is over
  std::unique_ptr<StepRecording> recording_;  // null when nothing is to be recorded
  bool records_ = false;                      // this step
  bool writes_timeline_ = false;
  uint64_t turns_ = 0;  // steps of this program that replicas ran together, when they asked
};

}  // namespace smp::runtime
