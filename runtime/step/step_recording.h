// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/schedule.h"
#include "pipeline/simulator.h"
#include "pipeline/timeline.h"
#include "runtime/runtime.h"

namespace smp::runtime {

/// Records some steps of a program under one schedule on this rank. Every rank of the world has one
/// for the same steps. Internal.
class StepRecording {
 public:
  /// `predicted`: the step as planned, in us; `bytes`: of this rank's actions, see
  /// `Executor::message_bytes`. All arguments but `bytes` are the same on all ranks of a pipeline.
  /// The first `skipped` steps are not recorded, the `steps` that follow are.
  StepRecording(const Runtime& runtime, const pipeline::Schedule& schedule,
                pipeline::Simulation predicted, const std::vector<int64_t>& bytes, int skipped,
                int steps);

  /// The recorder of the step of training that begins, the `number`-th; nullptr for none.
  pipeline::TimelineRecorder* begin_step(int64_t number);

  /// Whether the last step to be recorded has begun.
  bool is_complete() const { return !recorder_.has_room(); }

  /// When that step is done: the recorded steps of all ranks of the world, on each of them.
  /// Collective over the world.
  pipeline::Timeline gather(const std::string& title);

 private:
  const Runtime& runtime_;
  const pipeline::Schedule schedule_;
  const pipeline::Simulation predicted_;
  pipeline::TimelineRecorder recorder_;
  int skipped_;  // still to come
};

}  // namespace smp::runtime
