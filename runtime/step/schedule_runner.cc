// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/schedule_runner.h"

#include <c10/util/StringUtil.h>

#include <utility>

#include "core/log.h"
#include "pipeline/frame.h"
#include "pipeline/timeline_page.h"
#include "runtime/step/replica_join.h"
#include "runtime/step/units.h"

namespace smp::runtime {
namespace {

/// The steps skipped by a timeline without a trial. The first steps capture, plan and warm caches.
constexpr int kSkippedSteps = 2;
constexpr int kTimelineSteps = 3;

using TimelineState = Execution::TimelineState;

pipeline::Frame frame_of(const pipeline::Executor::Setup& setup, const Config& config) {
  pipeline::Frame frame;
  frame.copies = setup.copies;
  for (const auto& [stage, unused] : setup.outputs) frame.outputs.push_back(stage);
  if (setup.store) frame.loading_horizon = static_cast<int>(config.activation_loading_horizon());
  return frame;
}

/// A simulation with the actions that were added to its schedule, which take no time.
pipeline::Simulation with_added(pipeline::Simulation simulation,
                                const pipeline::Schedule& schedule) {
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    std::vector<pipeline::TimedAction> all;
    auto next = simulation.timeline[rank].begin();
    pipeline::TimedAction now;
    for (const pipeline::Action& action : schedule.actions(rank)) {
      const bool is_simulated = next != simulation.timeline[rank].end() && next->action == action;
      now = is_simulated ? *next++ : pipeline::TimedAction{action, now.end, now.end, now.memory};
      all.push_back(now);
    }
    simulation.timeline[rank] = std::move(all);
  }
  return simulation;
}

}  // namespace

ScheduleRunner::ScheduleRunner(Runtime& runtime, const graph::Graph& graph,
                               const partitioner::Plan& plan, PlannedStep step,
                               pipeline::Executor::Setup setup)
    : runtime_(runtime),
      graph_(graph),
      edges_(std::move(step.edges)),
      units_(std::move(step.units)),
      partitioned_(graph, plan, edges_),
      setup_(std::move(setup)) {
  if (!step.report.empty() && runtime.rank() == 0) core::log_info(step.report);
  use(step);
  if (!graph.trains()) return;
  identity_ = c10::str(graph.fingerprint(), " ", schedule().microbatches());
  if (runtime.config().timeline() && runtime.execution.timeline == TimelineState::kNotBegun) {
    runtime.execution.timeline = TimelineState::kRecorded;
    writes_timeline_ = true;
  }
  if (is_auto() && runtime.execution.trial_steps > 0) {
    trial_ = std::make_unique<ScheduleTrial>(step.options, step);
  }
  if (trial_ || writes_timeline_) record();
}

/// Whether there are schedules to choose from.
bool ScheduleRunner::is_auto() const {
  return graph_.trains() && runtime_.config().pipeline() == "auto" &&
         runtime_.group(CommGroup::kPp)->size() > 1;
}

/// Runs another schedule from the next step on. The stages of the one before go first, for their
/// memory.
void ScheduleRunner::use(const pipeline::RankedSchedule& of_stages) {
  const auto scheduled = units_ ? schedule_of_units(of_stages, *units_) : of_stages;
  const pipeline::Schedule schedule =
      pipeline::with_frame(scheduled.schedule, frame_of(setup_, runtime_.config()));
  name_ = scheduled.name;
  predicted_ = with_added(scheduled.simulation, schedule);
  const bool runs_already = executor_ && executor_->schedule() == schedule;
  if (runs_already) return;
  executor_.reset();
  executor_ = std::make_unique<pipeline::Executor>(schedule, partitioned_, setup_,
                                                   runtime_.pipeline_channels(),
                                                   runtime_.execution.messages_ahead);
}

/// Constants, as far as is known: an earlier step of another graph may have written them.
std::set<graph::ValueId> ScheduleRunner::unwritten() const {
  std::set<graph::ValueId> result;
  for (const pipeline::Frame::Copy& copy : setup_.copies) {
    for (const graph::ValueId id : copy.values) {
      const auto& entry = runtime_.table().at(graph_.values[id].name);
      if (!entry.is_parameter() && !entry.is_written) result.insert(id);
    }
  }
  return result;
}

/// Begins to record a part of the trial, or the timeline.
void ScheduleRunner::record() {
  recording_ = std::make_unique<StepRecording>(
      runtime_, schedule(), predicted_, executor_->message_bytes(unwritten()),
      trial_ ? ScheduleTrial::kWarmSteps : kSkippedSteps,
      trial_ ? ScheduleTrial::kRecordedSteps : kTimelineSteps, graph_.device());
}

pipeline::StepResults ScheduleRunner::run(pipeline::Executor::Step step) {
  const auto& observers = runtime_.execution.observers;
  step.unwritten = unwritten();
  step.observers.insert(step.observers.end(), observers.begin(), observers.end());
  if (records_) step.observers.push_back(recording_.get());
  return executor_->run(step);
}

bool ScheduleRunner::begin_recording() {
  // Replicas without batches do not run schedules.
  if (!graph_.trains() || runtime_.replica_join->is_joining()) return false;
  const bool tries = is_auto() && runtime_.execution.trial_steps > 0;
  if (tries) {
    --runtime_.execution.trial_steps;
  } else if (trial_) {
    // Too late.
    trial_.reset();
    recording_.reset();
    if (writes_timeline_) record();
  }
  if (tries || runtime_.execution.timeline == TimelineState::kRecorded) {
    const bool together = replicas_are_together();
    if (recording_ && !together) return false;
    ++turns_;
  }
  return recording_ && recording_->begin_step(runtime_.progress.training_steps + 1);
}

/// Whether all replicas run this program and have done so equally often. Collective over them.
bool ScheduleRunner::replicas_are_together() {
  const auto all =
      comm::all_gather_bytes(*runtime_.group(CommGroup::kDp), c10::str(identity_, " ", turns_));
  for (const std::string& other : all) {
    if (other != all.front()) return false;
  }
  return true;
}

void ScheduleRunner::end_step(std::vector<pipeline::ReductionRecord> reductions) {
  if (records_) recording_->record_reductions(std::move(reductions));
  if (!recording_ || !recording_->is_complete()) return;
  const auto recorded = recording_->gather(title());
  recording_.reset();
  if (trial_ && goes_on(recorded)) return;
  if (!writes_timeline_) return;
  runtime_.execution.timeline = TimelineState::kDone;
  if (runtime_.rank() != 0) return;
  const auto files = pipeline::write_timeline(recorded, *runtime_.config().timeline());
  core::log_info(c10::str("Timeline written to ", files.page, " and ", files.trace, "\n",
                          pipeline::to_string(recorded)));
}

/// Goes on with the trial, unless that was its last part.
bool ScheduleRunner::goes_on(const pipeline::Timeline& recorded) {
  trial_->learn(units_ ? pipeline::timeline_of_stages(recorded, units_->stage_of_unit) : recorded);
  use(trial_->current());
  if (!trial_->is_over()) {
    record();
    return true;
  }
  if (runtime_.rank() == 0) core::log_info(trial_->report());
  trial_.reset();
  return false;
}

std::string ScheduleRunner::title() const {
  return c10::str(is_auto() ? "auto: " : "", name_, ", ", schedule().stages(), " stages, ",
                  schedule().microbatches(), " microbatches");
}

}  // namespace smp::runtime
