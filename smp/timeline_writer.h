#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pipeline/schedule.h"
#include "pipeline/simulator.h"
#include "smp/runtime.h"

namespace smp::pipeline {
class TimelineRecorder;
}  // namespace smp::pipeline

namespace smp {

/// Records some steps of a program on this rank, and writes the page of the configuration's
/// `timeline` when the last of them is done. Every rank of the world has one. Internal.
class TimelineWriter {
 public:
  /// `predicted`: the step as planned, in us; `bytes`: of this rank's actions, see
  /// `Executor::message_bytes`. All arguments but `bytes` are the same on all ranks of a pipeline.
  TimelineWriter(const Runtime& runtime, const pipeline::Schedule& schedule,
                 pipeline::Simulation predicted, const std::vector<int64_t>& bytes);
  ~TimelineWriter();

  /// What is to record the step that begins; nullptr for none.
  pipeline::TimelineRecorder* begin_step();

  /// After the last recorded step collective over the world: rank 0 writes the files. Throws
  /// `ConfigError` if it cannot.
  void end_step();

 private:
  void write();

  const Runtime& runtime_;
  const pipeline::Schedule schedule_;
  const pipeline::Simulation predicted_;
  std::unique_ptr<pipeline::TimelineRecorder> recorder_;  // null once written
  int64_t step_ = 0;                                      // counted from 1
};

}  // namespace smp
