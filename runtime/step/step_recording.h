// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/device_clock.h"
#include "pipeline/observer.h"
#include "pipeline/schedule.h"
#include "pipeline/simulator.h"
#include "pipeline/timeline.h"
#include "runtime/job.h"

namespace smp::runtime {

/// Records some steps of a program under one schedule on this rank. Every rank of the world has one
/// for the same steps. Internal.
///
/// Actions begin and end when the host is at them if the rank computes on the CPU, else when the
/// device is, which the host gives its work ahead.
class StepRecording final : public pipeline::Observer {
 public:
  /// `predicted`: the step as planned, in us; `bytes`: of this rank's actions, see
  /// `Executor::message_bytes`. All arguments but `bytes` are the same on all ranks of a pipeline.
  /// The first `skipped` steps are not recorded, the `steps` that follow are. `device`: where this
  /// rank computes.
  StepRecording(const Job& job, const pipeline::Schedule& schedule, pipeline::Simulation predicted,
                const std::vector<int64_t>& bytes, int skipped, int steps, c10::Device device);

  /// The `number`-th step of training begins. Whether it is to be recorded: to be observed, and its
  /// reductions given.
  bool begin_step(int64_t number);
  void on_step_begin() override;
  /// An action begins when its parameters are there.
  void on_gathered() override { start_ = read_clock(); }
  void on_end(size_t index, const pipeline::Action& action) override;
  void on_step_end() override;
  void record_reductions(std::vector<pipeline::ReductionRecord> reductions) {
    recorder_.record_reductions(std::move(reductions));
  }

  /// Whether the last step to be recorded has begun.
  bool is_complete() const { return !recorder_.has_room(); }

  /// When that step is done: the recorded steps of all ranks of the world, on each of them.
  /// Collective over the world.
  pipeline::Timeline gather(const std::string& title);

 private:
  int64_t read_clock();

  const Job& job_;
  const pipeline::Schedule schedule_;
  const pipeline::Simulation predicted_;
  pipeline::TimelineRecorder recorder_;
  int skipped_;  // still to come
  const c10::Device device_;
  std::optional<pipeline::DeviceClock> device_clock_;  // null: the host's
  int64_t start_ = 0;                                  // reading at the start of the action
};

}  // namespace smp::runtime
