// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "graph/autograd_entry.h"
#include "graph/checkpointed_segment.h"
#include "graph/replay.h"
#include "graph/split_backward.h"
#include "graph/weight_fusion.h"
#include "pipeline/gradient_sums.h"
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

/// The leaf of a trained parameter in a microbatch. Used again in others, since there are many.
struct ParameterLeaf {
  at::Tensor tensor;
  graph::GradientSinkPtr sink;
};

/// The tensors that a stage holds, whichever microbatch it runs.
struct StageTensors {
  struct Parameter {
    at::Tensor tensor;
    std::vector<ParameterLeaf> spare;  ///< leaves of microbatches that have ended
  };
  std::vector<Parameter> parameters;  ///< and buffers, as in the program
  std::vector<at::Tensor> contents;   ///< constants and literals, as in the program
  graph::Environment& environment;    ///< see `PartitionedGraph`
};

/// One microbatch on a stage: its messages and, between its forward and its backward, the autograd
/// history of the operators and the entry points of values from outside. Stays where it is, and
/// its vectors keep their memory for the next step.
struct StageState {
  int microbatch = 0;
  std::vector<Message> values;     ///< values by place, which go forward
  std::vector<Message> gradients;  ///< gradients by place, which go back
  /// Takes the results, to the end of its backward, or of the forward if it has none. Null: none.
  StageRecord* record = nullptr;
  bool needed_soon = false;                   ///< before the forward: nothing goes to the store
  bool has_run = false;                       ///< forward
  std::vector<graph::GradientSinkPtr> sinks;  ///< sinks by number
  std::vector<ParameterLeaf> leaves;          ///< leaves by parameter; undefined for others
  graph::RegionInputs stored;                 ///< inputs in the store
  /// Where the backward starts: at the roots, then at the sent values, edge by edge. The gradients
  /// of the roots are known after the forward, the others follow when the backward begins.
  std::vector<torch::autograd::Edge> starts;
  std::vector<at::Tensor> start_gradients;
  /// Gradients of owned parameters that only later stages read.
  Gradients foreign;
  GradientSums* sums = nullptr;  ///< takes gradients, in the backward; null: none
  /// Between the parts of a backward: its rest.
  std::unique_ptr<graph::SplitBackward> split;
  std::unique_ptr<graph::WeightFusion> fusion;

  /// Begins to bring back its tensors from the store. Before the forward: nothing of it goes there.
  void prefetch();
  /// Forgets all but the messages.
  void forget();
};

/// Puts all that the operators read from outside into the environment.
void enter(const StageProgram& program, const std::vector<at::Tensor>& inputs,
           StageTensors& tensors, StageState& state);

/// When the operators have run: keeps for the backward where it starts, puts the values that others
/// read into their messages and the step's returned tensors into `results`.
void leave(const StageProgram& program, const StageTensors& tensors, StageState& state,
           StepResults& results);

/// Runs the backward of the microbatch. Gradients of owned parameters go to `sums`, each as soon as
/// it is complete; those that matrix products make may be added there by the products (see
/// `graph::WeightFusion`). Null: they are returned, or dropped where the microbatch is recorded.
Gradients backward(const StageProgram& program, StageState& state, GradientSums* sums);

/// The same in two parts (see `graph::SplitBackward`), with the same bits: first the gradients that
/// other stages wait for; later the gradients of owned parameters.
void backward_inputs(const StageProgram& program, StageState& state, GradientSums* sums);
Gradients backward_weights(const StageProgram& program, StageState& state, GradientSums* sums);

}  // namespace smp::pipeline
