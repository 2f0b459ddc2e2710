// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/refusal.h"
#include "pipeline/action.h"
#include "pipeline/stage.h"
#include "pipeline/stage_device_graphs.h"

namespace smp::pipeline {

/// The computations of this rank in a step, as device graphs. A step is run operator by operator
/// and watched; before the next one its computations are captured, in the order of the schedule, in
/// which they are launched from then on.
///
/// Device graphs share their memory: one may overwrite what others, captured after it, have left
/// there. Where no forward waits for its backward nothing is left, so the graphs between two such
/// points serve all later microbatches that run likewise. Those of one microbatch do for a rank
/// that adds up microbatches, for the last stage of 1F1B and for evaluation. A stage that holds
/// several microbatches at a time has graphs for each of the step.
///
/// Belongs to one thread.
class StepDeviceGraphs {
 public:
  /// `required`: a computation that cannot be captured is an error; else it runs operator by
  /// operator, and a line of log says why. `actions`: those of this rank in a step, of so many
  /// microbatches, which outlive it.
  StepDeviceGraphs(at::Device device, const std::vector<Action>& actions, int microbatches,
                   bool required);
  /// Waits for the graphs that were launched.
  ~StepDeviceGraphs();
  StepDeviceGraphs(const StepDeviceGraphs&) = delete;
  StepDeviceGraphs& operator=(const StepDeviceGraphs&) = delete;

  /// Each stage of this rank, which outlives it, before the first step. Throws `UsageError` where
  /// `required` and the stage cannot be captured.
  void add_stage(Stage& stage);

  /// Before a step. `refusal`: why it has to run operator by operator. Throws `UsageError` where
  /// `required` and something cannot be captured.
  void begin_step(const core::Refusal& refusal);

  /// Does the same as `Stage::forward`. False, and nothing is done, where the stage has to run it.
  bool forward(const Action& action, const std::vector<at::Tensor>& inputs,
               const graph::RandomKey& key, StepResults& results);
  /// Does the same as `Stage::backward` and its two parts.
  bool backward(const Action& action, const graph::RandomKey& key, GradientSums& sums);

 private:
  enum class Use { kNothing, kNotes, kLaunches };
  using Block = std::vector<Action>;

  void report(const std::string& reason);
  void give_up(const std::string& reason);
  core::Refusal capture();
  void capture_all();
  std::vector<Block> blocks() const;
  bool serves(const Block& captured, const Block& block) const;
  size_t capture(const std::vector<Block>& blocks);
  void forget_graphs();
  void wait_for_launches();
  bool are_valid() const;

  const at::Device device_;
  const std::vector<Action>& actions_;
  const int microbatches_;
  const bool required_;
  std::map<int, StageDeviceGraphs> graphs_;  // graphs of stages that can be captured
  Use use_ = Use::kNothing;                  // in this step
  bool is_noted_ = false, is_captured_ = false;
  std::optional<c10::Stream> launched_on_;  // device graphs that may be under way
  std::set<int> said_;  // stages that have run a microbatch themselves, and said so
};

}  // namespace smp::pipeline
