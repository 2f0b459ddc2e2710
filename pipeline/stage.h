#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graph/autograd_entry.h"
#include "graph/graph.h"
#include "graph/random.h"
#include "graph/replay.h"
#include "graph/split_backward.h"
#include "graph/tensor_table.h"
#include "graph/tracer.h"
#include "partitioner/plan.h"
#include "pipeline/message.h"
#include "pipeline/schedule.h"

namespace smp::pipeline {

/// What goes over one edge between two stages, besides its direction.
struct Edge {
  int from = 0;
  int to = 0;
  std::vector<graph::ValueId> values;     ///< sent forward
  std::vector<graph::ValueId> gradients;  ///< of these of `values` the gradient comes back
  std::vector<graph::ValueId> replicas;   ///< parameters whose gradient comes back only
};

/// The edges of a plan, ordered by (from, to); the same list on every rank.
std::vector<Edge> edges_of(const graph::Graph& graph, const partitioner::Plan& plan);

/// The same edges as the schedule knows them.
std::vector<StageEdge> stage_edges(const std::vector<Edge>& edges);

/// Takes the gradient of one microbatch for a parameter the stage owns.
using GradientConsumer =
    std::function<void(graph::ValueId parameter, int microbatch, const at::Tensor& gradient)>;

/// One stage of a pipeline: its part of the graph, ready to run microbatch by microbatch.
///
/// A stage holds, for every microbatch between forward and backward, the autograd history of its
/// operators, what it sent, and the entry points of what it received. It belongs to one thread.
class Stage {
 public:
  /// `graph` and `edges` must outlive the stage.
  Stage(const graph::Graph& graph, const partitioner::Plan& plan, const std::vector<Edge>& edges,
        int index, const graph::TensorTable& table);

  int index() const { return index_; }

  /// Uses other constants from the next microbatch on.
  void apply(const std::vector<graph::ConstantOverride>& constants,
             const std::vector<graph::ContentOverride>& contents);

  /// Runs the stage's operators on microbatch `microbatch`. `inputs` are the step's inputs for
  /// it, by graph input; `received` holds per incoming edge (in the order of `edges`) the values
  /// of that edge.
  void forward(int microbatch, const std::vector<at::Tensor>& inputs,
               const std::map<int, std::vector<at::Tensor>>& received, const graph::RandomKey& key);

  /// The values to send over edge `edge` after `forward(microbatch)`; taken out, so that they are
  /// freed when sent.
  std::vector<at::Tensor> take_values(int microbatch, int edge);

  /// Runs the backward of the microbatch and forgets it. `received` holds per outgoing edge the
  /// gradients that came back, of `Edge::gradients` and then `Edge::replicas`. Gradients of owned
  /// parameters go to `consume`.
  void backward(int microbatch, const std::map<int, std::vector<at::Tensor>>& received,
                const GradientConsumer& consume);

  /// The same in two parts (see `graph::SplitBackward`), with the same bits: first what other
  /// stages wait for, after which `take_gradients` has it; later the gradients of owned parameters,
  /// after which the microbatch is forgotten.
  void backward_inputs(int microbatch, const std::map<int, std::vector<at::Tensor>>& received);
  void backward_weights(int microbatch, const GradientConsumer& consume);

  /// The gradients to send back over incoming edge `edge` after `backward(microbatch)` or
  /// `backward_inputs(microbatch)`; taken out.
  std::vector<at::Tensor> take_gradients(int microbatch, int edge);

  /// The step's returned tensors that are complete on this stage, by position among the graph's
  /// outputs, of a microbatch whose forward has run; taken out. They keep their history until the
  /// microbatch's backward.
  std::map<int, at::Tensor> take_outputs(int microbatch);

 private:
  /// A microbatch between its forward and its backward.
  struct InFlight {
    std::map<graph::ValueId, std::shared_ptr<graph::GradientSink>> sinks;
    std::map<graph::ValueId, torch::autograd::Edge> starts;  // of values that get a gradient
    std::vector<at::Tensor> root_gradients;                  // per entry of `roots_`
    // Between the parts of a backward: what is left of it, and gradients of owned parameters that
    // only later stages read.
    std::unique_ptr<graph::SplitBackward> split;
    std::vector<std::pair<graph::ValueId, at::Tensor>> foreign;

    at::Tensor gradient(graph::ValueId value) const;
  };
  /// Where the backward of a microbatch starts.
  struct Starts {
    std::vector<torch::autograd::Edge> edges;
    std::vector<at::Tensor> gradients;
  };
  struct Input {
    graph::ValueId value;
    size_t position;  // among the step's inputs
    bool written;     // by an operator of this stage: the caller's tensor stays as it is
  };
  struct Parameter {
    graph::ValueId value;
    at::Tensor tensor;
    bool owned;
    bool differentiated;
    /// A buffer that a backward may need as a microbatch found it, while later ones go on writing
    /// it: each works on a copy and leaves what it made of it.
    bool copied;
  };
  struct Content {
    graph::ValueId value;
    at::Tensor tensor;
    bool written;  // by an operator of this stage: every microbatch gets a copy
  };

  bool on_shared_memory(graph::ValueId value) const;
  bool writes(graph::ValueId value) const;
  bool backward_may_need(graph::ValueId value) const;
  void find_kept();
  void find_reads(const partitioner::Plan& plan, const graph::TensorTable& table);
  void enter_all(InFlight& state, graph::Environment& environment,
                 const std::vector<at::Tensor>& inputs,
                 const std::map<int, std::vector<at::Tensor>>& received) const;
  Starts begin_backward(InFlight& state,
                        const std::map<int, std::vector<at::Tensor>>& received) const;
  std::vector<std::shared_ptr<graph::GradientSink>> input_sinks(const InFlight& state) const;
  void keep_gradients(int microbatch, const InFlight& state);
  void consume_gradients(int microbatch, const InFlight& state,
                         const GradientConsumer& consume) const;
  void keep_results(int microbatch, InFlight& state, const graph::Environment& environment);

  const graph::Graph& graph_;
  const std::vector<Edge>& edges_;
  const int index_;
  std::vector<int> operators_;
  std::vector<graph::BackwardRoot> roots_;  // those that start on this stage
  std::vector<int> returned_;               // positions of the graph's outputs complete here
  std::set<int> copied_;                    // those of them that others go on writing
  std::vector<graph::ValueId> kept_;        // what is read when the operators have run
  std::unique_ptr<graph::Segment> segment_;
  std::vector<Input> inputs_;
  std::vector<Parameter> parameters_;                                // and buffers
  std::vector<Content> contents_;                                    // constants and literals
  std::map<int, InFlight> in_flight_;                                // by microbatch
  std::map<int, std::map<int, std::vector<at::Tensor>>> values_;     // by microbatch and edge
  std::map<int, std::map<int, std::vector<at::Tensor>>> gradients_;  // by microbatch and edge
  std::map<int, std::map<int, at::Tensor>> outputs_;  // by microbatch and output position
};

}  // namespace smp::pipeline
