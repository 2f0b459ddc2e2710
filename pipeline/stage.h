// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/refusal.h"
#include "graph/autograd_entry.h"
#include "graph/checkpointed_segment.h"
#include "graph/graph.h"
#include "graph/graph_map.h"
#include "graph/random.h"
#include "graph/replay.h"
#include "graph/split_backward.h"
#include "graph/tensor_table.h"
#include "graph/weight_fusion.h"
#include "partitioner/plan.h"
#include "pipeline/edges.h"
#include "pipeline/gradient_sums.h"
#include "pipeline/message.h"
#include "pipeline/stage_program.h"
#include "pipeline/stage_record.h"

namespace smp::pipeline {

/// The tensors that go over one edge in one direction for one microbatch, in the order of `Edge`.
using Message = std::vector<at::Tensor>;

/// The results of the forwards of a step on a rank.
struct StepResults {
  /// A tensor that the step returns.
  struct Output {
    int position;  ///< position among the graph's outputs
    int microbatch;
    at::Tensor value;
  };
  /// A copy of a number that the backward of a microbatch starts from.
  struct Loss {
    int microbatch;
    at::Tensor value;
  };

  bool keeps_history = false;  ///< history of outputs
  bool keeps_losses = false;
  std::vector<Output> outputs;
  std::vector<Loss> losses;
};

/// One stage of a pipeline: its part of the graph, ready to run microbatch by microbatch.
///
/// A stage holds, for every microbatch between forward and backward, the autograd history of its
/// operators and the entry points of the values received. It belongs to one thread.
class Stage {
 public:
  /// For `microbatches` microbatches, 0 to microbatches - 1. `graph` and `edges` must outlive the
  /// stage.
  Stage(const graph::Graph& graph, const partitioner::Plan& plan, const std::vector<Edge>& edges,
        int index, int microbatches, const graph::TensorTable& table);

  /// Its part of the graph.
  const StageProgram& program() const { return program_; }
  int index() const { return program_.index; }

  /// Runs some of the operators again in the backward pass (see `graph::CheckpointedSegment`).
  /// `region_of_operator`: per operator of the graph the number of its region, or -1. Their inputs
  /// go to `store`, unless it is null. Before the first forward.
  void set_regions(const std::vector<int>& region_of_operator,
                   std::shared_ptr<graph::TensorStore> store);

  /// Before the first forward of a step, and after its last backward: in between, autocast casts a
  /// weight once (see `graph::WeightCasts`). For one microbatch, and where parameters come and go,
  /// that would only take memory.
  void begin_step();
  void end_step() { segment_->casts().end_step(); }
  /// From the next step on no cast of a weight outlives its microbatch.
  void forget_casts_of_microbatches() { shares_casts_ = false; }

  /// Begins to bring back the microbatch's tensors from the store. Before its forward: nothing of
  /// it goes there.
  void prefetch(int microbatch);

  /// The place of the values that go forward over edge `edge` (an index into `edges`, at one end of
  /// which is this stage) for a microbatch. If it comes here it must be there before `forward`,
  /// which empties the place; if it goes out, `forward` puts it there and its sender empties the
  /// place. Places stay where they are.
  Message& values(int microbatch, int edge);

  /// The same for the way back: `Edge::gradients` and then `Edge::replicas`, with undefined tensors
  /// where there is no gradient; for `backward` and `backward_inputs`.
  Message& gradients(int microbatch, int edge);

  /// Uses other constants from the next microbatch on.
  void apply(const std::vector<graph::ConstantOverride>& constants,
             const std::vector<graph::ContentOverride>& contents);

  /// Runs the stage's operators on microbatch `microbatch`. `inputs` are the step's inputs for
  /// it, by graph input. The step's returned tensors that are complete here go to `results`, and
  /// the numbers that the backward starts from.
  void forward(int microbatch, const std::vector<at::Tensor>& inputs, const graph::RandomKey& key,
               StepResults& results);

  /// Runs the backward of the microbatch and forgets it. Gradients of owned parameters go to
  /// `sums`, each as soon as it is complete; those that matrix products make may be added there by
  /// the products (see `graph::WeightFusion`). Null: they are returned, or dropped where the
  /// microbatch is recorded.
  Gradients backward(int microbatch, GradientSums* sums);

  /// The same in two parts (see `graph::SplitBackward`), with the same bits: first the gradients
  /// that other stages wait for; later the gradients of owned parameters, after which the
  /// microbatch is forgotten.
  void backward_inputs(int microbatch, GradientSums* sums);
  Gradients backward_weights(int microbatch, GradientSums* sums);

  /// That of these three which the action is.
  Gradients backward(const Action& action, GradientSums* sums);

  /// From the microbatch's next forward to the end of its backward, or of the forward if it has
  /// none: writes the results into `record`. Null: nothing.
  void record(int microbatch, StageRecord* record) { in_flight_.at(microbatch).record = record; }
  /// Runs the microbatch of which this stage, on another rank perhaps, was `given` these tensors
  /// again, forward and backward, as its microbatch 0, and records it. Writes only tensors that it
  /// made itself; its own parameters are forgotten, so it is good for nothing else from then on.
  void run_again(const std::vector<at::Tensor>& given, const graph::RandomKey& key,
                 StageRecord& record);

  /// Whether the host may wait for other ranks in its computations: in operators that are not
  /// libtorch's own.
  bool may_wait() const { return may_wait_; }

  /// Why its computations cannot be captured as device graphs, as far as is known. After
  /// `set_regions`.
  core::Refusal why_no_device_graphs() const;
  /// Before its computations are captured: in later steps they read the casts of weights where they
  /// lie then.
  void reserve_casts();
  void forget_casts() { segment_->casts().forget(); }
  /// Where the data of its parameters and buffers lie.
  std::vector<const void*> addresses() const;
  /// Whether operators run again in the backward pass.
  bool runs_again() const { return segment_->regions() > 0; }
  /// Forgets the leaves that it keeps from one microbatch for another: autograd's functions compute
  /// on the stream on which they were made. Between steps.
  void forget_leaves();
  /// Asserts that no microbatch is in flight, and that all messages have been taken: the rank has
  /// done what its list says, and nothing else.
  void check_done() const;
  /// Forgets all microbatches, after an error.
  void forget_microbatches();

 private:
  using Entry = StageProgram::Entry;

  /// The leaf of a trained parameter in a microbatch. Used again in others, since there are many.
  struct Leaf {
    at::Tensor tensor;
    graph::GradientSinkPtr sink;
  };
  /// The receiver of gradients as they are made: together, so that each sink holds a pointer only.
  struct Taking {
    const Stage* stage = nullptr;
    GradientSums* sums = nullptr;
    int microbatch = 0;
  };
  /// A microbatch between its forward and its backward. Vectors keep their memory for the next.
  struct InFlight {
    std::vector<graph::GradientSinkPtr> sinks;  // sinks by number
    std::vector<Leaf> leaves;                   // leaves by parameter; undefined for others
    // Where the backward starts: at the roots, then at the sent values, edge by edge. The gradients
    // of the roots are known after the forward, the others follow when the backward begins.
    std::vector<torch::autograd::Edge> starts;
    std::vector<at::Tensor> start_gradients;
    // Between the parts of a backward: its rest.
    std::unique_ptr<graph::SplitBackward> split;
    std::unique_ptr<graph::WeightFusion> fusion;
    // Gradients of owned parameters that only later stages read.
    std::vector<std::pair<graph::ValueId, at::Tensor>> foreign;
    graph::RegionInputs stored;      // inputs in the store
    StageRecord* record = nullptr;   // null: not recorded
    Taking taking;                   // gradients, in the backward
    bool has_run = false;            // forward
    bool needed_soon = false;        // before the forward: nothing goes to the store
    std::vector<Message> values;     // values by place
    std::vector<Message> gradients;  // gradients by place

    void forget();
  };
  /// A parameter or buffer of the program.
  struct Held {
    at::Tensor tensor;
    std::vector<Leaf> spare;  // leaves of microbatches that have ended
  };

  void enter(const Entry& entry, const at::Tensor& data, InFlight& state);
  void enter_parameters(InFlight& state);
  void enter_all(InFlight& state, const std::vector<at::Tensor>& inputs);
  void run_operators(InFlight& state, const graph::RandomKey& key);
  void keep_starts(InFlight& state) const;
  void give_losses(int microbatch, StepResults& results) const;
  void keep_values(InFlight& state) const;
  void give_outputs(int microbatch, StepResults& results) const;
  void begin_backward(InFlight& state) const;
  void fuse(int microbatch, InFlight& state, GradientSums* sums, bool defer) const;
  void keep_gradients(InFlight& state) const;
  void record_given(const InFlight& state) const;
  void record_given_gradients(const InFlight& state) const;
  graph::ResultObserver result_observer(const InFlight& state) const;
  void record_buffers(const InFlight& state) const;
  void record_gradient(graph::ValueId parameter, const at::Tensor& gradient,
                       const InFlight& state) const;
  void record_gradients(const InFlight& state) const;
  void finish(InFlight& state);
  void take_gradients(int microbatch, InFlight& state, GradientSums* sums) const;
  Gradients give_rest(int microbatch, const InFlight& state, GradientSums* sums) const;

  const StageProgram program_;
  std::unique_ptr<graph::CheckpointedSegment> segment_;
  std::shared_ptr<graph::TensorStore> store_;
  bool shares_casts_;  // among microbatches
  bool may_wait_;
  std::vector<Held> held_;            // parameters and buffers, as in the program
  std::vector<at::Tensor> contents_;  // constants and literals, as in the program
  graph::Environment environment_;    // environment of the forward that runs
  std::vector<InFlight> in_flight_;   // state of each microbatch
};

}  // namespace smp::pipeline
