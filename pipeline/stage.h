// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "core/refusal.h"
#include "graph/checkpointed_segment.h"
#include "graph/graph_map.h"
#include "graph/random.h"
#include "graph/replay.h"
#include "graph/tensor_table.h"
#include "pipeline/action.h"
#include "pipeline/gradient_sums.h"
#include "pipeline/stage_program.h"
#include "pipeline/stage_record.h"
#include "pipeline/stage_state.h"

namespace smp::pipeline {

/// One stage of a pipeline: its part of the graph, ready to run microbatch by microbatch.
///
/// A stage holds its program, the tensors that all microbatches share and the state of each. It
/// belongs to one thread.
class Stage {
 public:
  /// For `microbatches` microbatches, 0 to microbatches - 1. `partitioned` outlives the stage. Some
  /// operators run again in the backward pass (see `graph::CheckpointedSegment`), and their inputs
  /// go to `store`, unless it is null. `region_of_operator`: per operator of the graph the number
  /// of its region, or -1; empty: none does.
  Stage(const PartitionedGraph& partitioned, int index, int microbatches,
        const graph::TensorTable& table, const std::vector<int>& region_of_operator = {},
        std::shared_ptr<graph::TensorStore> store = nullptr);

  /// Its part of the graph.
  const StageProgram& program() const { return program_; }
  int index() const { return program_.index; }
  StageState& state(int microbatch) { return states_.at(microbatch); }

  /// Before the first forward of a step, and after its last backward: in between, autocast casts a
  /// weight once (see `graph::WeightCasts`). For one microbatch, and where parameters come and go,
  /// that would only take memory.
  void begin_step();
  void end_step() { segment_.casts().end_step(); }
  /// From the next step on no cast of a weight outlives its microbatch.
  void forget_casts_of_microbatches() { shares_casts_ = false; }

  /// The place of a microbatch's message over edge `edge` (an index into `edges`, at one end of
  /// which is this stage): of values, which go forward; or of gradients, which go back
  /// (`Edge::gradients` and then `Edge::replicas`, with undefined tensors where there is none). If
  /// it comes here it must be there before the computation, which empties the place; if it goes
  /// out, the computation puts it there and its sender empties the place. Places stay where they
  /// are.
  Message& message(int microbatch, int edge, bool is_backward);

  /// Uses other constants from the next microbatch on.
  void apply(const std::vector<graph::ConstantOverride>& constants,
             const std::vector<graph::ContentOverride>& contents);

  /// Runs the stage's operators on microbatch `microbatch`. `inputs` are the step's inputs for
  /// it, by graph input. The step's returned tensors that are complete here go to `results`, and
  /// the numbers that the backward starts from.
  void forward(int microbatch, const std::vector<at::Tensor>& inputs, const graph::RandomKey& key,
               StepResults& results);

  /// Runs the backward of a microbatch, or the part of it that the action is, as the functions of
  /// `stage_state.h` do, and forgets the microbatch when it is done.
  Gradients backward(const Action& action, GradientSums* sums);

  /// Runs the microbatch of which this stage, on another rank perhaps, was `given` these tensors
  /// again, forward and backward, as its microbatch 0, and records it. Writes only tensors that it
  /// made itself; its own parameters are forgotten, so it is good for nothing else from then on.
  void run_again(const std::vector<at::Tensor>& given, const graph::RandomKey& key,
                 StageRecord& record);

  /// Why its computations cannot be captured as device graphs, as far as is known.
  core::Refusal why_no_device_graphs() const;
  /// Before its computations are captured: in later steps they read the casts of weights where they
  /// lie then.
  void reserve_casts();
  void forget_casts() { segment_.casts().forget(); }
  /// Where the data of its parameters and buffers lie.
  std::vector<const void*> addresses() const;
  /// Whether operators run again in the backward pass.
  bool runs_again() const { return segment_.regions() > 0; }
  /// Forgets the leaves that it keeps from one microbatch for another: autograd's functions compute
  /// on the stream on which they were made. Between steps.
  void forget_leaves();
  /// Asserts that no microbatch is in flight, and that all messages have been taken: the rank has
  /// done what its list says, and nothing else.
  void check_done() const;
  /// Forgets all microbatches, after an error.
  void forget_microbatches();

 private:
  void run_operators(StageState& state, const graph::RandomKey& key);
  void finish(StageState& state);

  const StageProgram program_;
  graph::CheckpointedSegment segment_;
  const std::shared_ptr<graph::TensorStore> store_;
  bool shares_casts_;  // among microbatches
  StageTensors tensors_;
  std::vector<StageState> states_;  // states by microbatch
};

}  // namespace smp::pipeline
