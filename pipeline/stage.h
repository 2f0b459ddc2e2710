// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graph/alias_analysis.h"
#include "graph/autograd_entry.h"
#include "graph/checkpointed_segment.h"
#include "graph/graph.h"
#include "graph/parameter_residency.h"
#include "graph/random.h"
#include "graph/replay.h"
#include "graph/split_backward.h"
#include "graph/tensor_table.h"
#include "graph/tracer.h"
#include "graph/weight_fusion.h"
#include "partitioner/plan.h"
#include "pipeline/edges.h"
#include "pipeline/message.h"
#include "pipeline/stage_record.h"

namespace smp::pipeline {

/// The tensors that go over one edge in one direction for one microbatch, in the order of `Edge`.
using Message = std::vector<at::Tensor>;

/// Takes the gradient of one microbatch for a parameter the stage owns, with its memory where
/// nothing else has that.
using GradientConsumer =
    std::function<void(graph::ValueId parameter, int microbatch, at::Tensor gradient)>;

/// The same for several parameters, each once, whose gradients lie in memory that is the giver's.
using GradientsConsumer = std::function<void(
    int microbatch, const std::vector<std::pair<graph::ValueId, at::Tensor>>& gradients)>;

/// Where a gradient of an owned parameter of float32 or float64 may be added instead: a tensor of
/// its sizes and dtype. Asked for only when something is added.
using GradientBuffer = std::function<at::Tensor(graph::ValueId parameter, int microbatch)>;

/// Takes a tensor that the step returns: its position among the graph's outputs, the microbatch.
using OutputConsumer = std::function<void(int position, int microbatch, const at::Tensor& output)>;

/// Takes a tensor that the backward of a microbatch starts from.
using RootConsumer = std::function<void(int microbatch, const at::Tensor& root)>;

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

  int index() const { return index_; }
  /// Describes its inputs, the values that enter and leave it over edges, and the targets of
  /// gradients: a line for each.
  std::string describe() const;
  /// Whether its backward runs: see `backward_of_stage`.
  bool has_backward() const { return has_backward_; }

  /// Runs some of the operators again in the backward pass (see `graph::CheckpointedSegment`).
  /// `region_of_operator`: per operator of the graph the number of its region, or -1. Their inputs
  /// go to `store`, unless it is null. Before the first forward.
  void set_regions(const std::vector<int>& region_of_operator,
                   std::shared_ptr<graph::TensorStore> store);

  /// Makes the data of parameters available only while they are read. Before the first forward, and
  /// after `set_regions`.
  void set_residency(std::shared_ptr<graph::ParameterResidency> residency);

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

  /// Whether `forward` reads the step's input at this position.
  bool reads_input(size_t position) const;

  /// Uses other constants from the next microbatch on.
  void apply(const std::vector<graph::ConstantOverride>& constants,
             const std::vector<graph::ContentOverride>& contents);

  /// Runs the stage's operators on microbatch `microbatch`. `inputs` are the step's inputs for
  /// it, by graph input. The step's returned tensors that are complete here go to `output`; they
  /// keep their history until the microbatch's backward, if the stage has one. Those that the
  /// backward starts from go to `root`, unless it is null.
  void forward(int microbatch, const std::vector<at::Tensor>& inputs, const graph::RandomKey& key,
               const OutputConsumer& output, const RootConsumer& root = nullptr);

  /// Runs the backward of the microbatch and forgets it. Gradients of owned parameters go to
  /// `consume`, each as soon as it is complete, and those that matrix products make into `buffer`,
  /// unless that is null (see `graph::WeightFusion`).
  void backward(int microbatch, const GradientConsumer& consume, const GradientBuffer& buffer);

  /// The same in two parts (see `graph::SplitBackward`), with the same bits: first the gradients
  /// that other stages wait for; later the gradients of owned parameters, after which the
  /// microbatch is forgotten.
  void backward_inputs(int microbatch, const GradientBuffer& buffer);
  void backward_weights(int microbatch, const GradientConsumer& consume);

  /// From the microbatch's next forward to the end of its backward, or of the forward if it has
  /// none: writes the results into `record`. Null: nothing.
  void record(int microbatch, StageRecord* record) { in_flight_.at(microbatch).record = record; }
  /// The values of `StageRecord::given`, in its order.
  std::vector<graph::ValueId> given() const;
  /// Why `run_again` cannot run this stage, as a sentence without a full stop; empty if it can.
  std::string why_not_again() const;
  /// Runs the microbatch of which this stage, on another rank perhaps, was `given` these tensors
  /// again, forward and backward, as its microbatch 0, and records it. Writes only tensors that it
  /// made itself; its own parameters are forgotten, so it is good for nothing else from then on.
  void run_again(const std::vector<at::Tensor>& given, const graph::RandomKey& key,
                 StageRecord& record);

  /// Whether the host may wait for other ranks in its computations: in operators that are not
  /// libtorch's own (leaves, divided layers), or for parameters that are divided.
  bool may_wait() const { return residency_ != nullptr || calls_foreign_; }

  /// Why its computations cannot be captured as graphs of its device, as a sentence without a full
  /// stop; empty if nothing is known that speaks against it. After `set_regions` and
  /// `set_residency`.
  std::string why_not_captured() const;
  /// Where the data of its parameters and buffers lie.
  std::vector<const void*> addresses() const;
  /// Whether operators run again in the backward pass.
  bool runs_again() const { return segment_->regions() > 0; }
  /// Ordinals of its random operators, ascending.
  std::vector<int> random_ordinals() const;
  /// Forgets the leaves that it keeps from one microbatch for another: autograd's functions compute
  /// on the stream on which they were made. Between steps.
  void forget_leaves();
  /// Forgets all microbatches, after an error.
  void forget_microbatches();

  /// The parameters whose gradients its backwards may give to `consume`.
  std::vector<graph::ValueId> consumed() const;

 private:
  static constexpr int kNoSink = -1;

  /// The leaf of a trained parameter in a microbatch. Used again in others, since there are many.
  struct Leaf {
    at::Tensor tensor;
    graph::GradientSinkPtr sink;
  };
  /// The receiver of gradients as they are made: together, so that each sink holds a pointer only.
  struct Taking {
    const Stage* stage = nullptr;
    const GradientConsumer* consume = nullptr;
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
  /// A tensor that enters the stage, and the number of the sink of its gradient.
  struct Entry {
    graph::ValueId value;
    int sink;
    bool requires_grad = true;
    bool linked = true;
    bool written_view = false;
  };
  /// An edge from an earlier stage: the incoming values, and the sinks of the gradients that go
  /// back.
  struct Incoming {
    size_t place;
    std::vector<Entry> values;
    std::vector<int> returning;
  };
  /// An edge to a later stage: its values, those whose gradient comes back, and parameters.
  struct Outgoing {
    size_t place;
    std::vector<graph::ValueId> values;
    std::vector<graph::ValueId> gradients;
    std::vector<Entry> replicas;
  };
  struct Input {
    graph::ValueId value;
    size_t position;  // among the step's inputs
    bool written;     // an operator of this stage writes it: the caller's tensor stays
  };
  struct Parameter {
    graph::ValueId value;
    at::Tensor tensor;
    bool owned;
    int sink;
    /// True for a buffer that later microbatches overwrite while a backward still needs its old
    /// value. Each microbatch works on a copy and writes it back.
    bool copied;
    std::vector<Leaf> spare = {};  // leaves of microbatches that have ended
  };
  struct Content {
    graph::ValueId value;
    at::Tensor tensor;
    bool written;  // whether an operator of this stage writes it: every microbatch gets a copy
  };

  /// Whether the host may do more for an operator than give the device work.
  static bool is_foreign(const graph::Operator& op);
  bool on_shared_memory(graph::ValueId value) const;
  bool writes(graph::ValueId value) const;
  bool backward_may_need(graph::ValueId value) const;
  bool is_copied(graph::ValueId value) const;
  void find_kept();
  void find_reads(const partitioner::Plan& plan, const graph::TensorTable& table);
  void find_edges();
  void find_incoming(const Edge& edge, size_t place);
  void find_outgoing(const Edge& edge, size_t place);
  int sink_of(graph::ValueId value) const;
  size_t place_of(int edge) const;
  void enter(const Entry& entry, const at::Tensor& data, InFlight& state);
  void enter_parameters(InFlight& state);
  void enter_all(InFlight& state, const std::vector<at::Tensor>& inputs);
  void run_operators(InFlight& state, const graph::RandomKey& key);
  at::Tensor copy_of(const at::Tensor& tensor) const;
  void keep_starts(InFlight& state) const;
  void give_roots(int microbatch, const RootConsumer& root) const;
  void keep_values(InFlight& state) const;
  void give_outputs(int microbatch, const OutputConsumer& output) const;
  void begin_backward(InFlight& state) const;
  void fuse(int microbatch, InFlight& state, const GradientBuffer& buffer, bool defer) const;
  void keep_gradients(InFlight& state) const;
  void give_gradient(graph::ValueId parameter, int microbatch, const InFlight& state,
                     at::Tensor gradient, const GradientConsumer& consume) const;
  void record_given(const InFlight& state) const;
  void record_given_gradients(const InFlight& state) const;
  graph::ResultObserver result_observer(const InFlight& state) const;
  void record_buffers(const InFlight& state) const;
  void record_gradients(const InFlight& state) const;
  void finish(InFlight& state);
  void take_gradients(int microbatch, InFlight& state, const GradientConsumer& consume) const;
  void consume_gradients(int microbatch, const InFlight& state,
                         const GradientConsumer& consume) const;

  const graph::Graph& graph_;
  const graph::AliasAnalysis aliases_;
  const std::vector<Edge>& edges_;
  const int index_;
  const bool has_backward_;
  const std::vector<int> separated_;  // see graph::sets_to_separate
  const std::vector<int> uses_;       // see graph::uses_of_storages
  bool calls_foreign_ = false;        // operators that are not libtorch's own
  std::vector<int> operators_;
  std::vector<graph::BackwardRoot> roots_;  // those that start on this stage
  std::vector<int> returned_;               // positions of the graph's outputs complete here
  std::set<int> copied_;                    // those of them that others go on writing
  std::vector<graph::ValueId> kept_;        // values that are read when the operators have run
  std::unique_ptr<graph::CheckpointedSegment> segment_;
  std::shared_ptr<graph::TensorStore> store_;
  std::shared_ptr<graph::ParameterResidency> residency_;  // null: all data is always there
  std::vector<Input> inputs_;
  std::vector<Parameter> parameters_;  // and buffers
  std::vector<Content> contents_;      // constants and literals
  std::vector<int> own_edges_;         // ascending; the place of an edge is its position here
  std::vector<Incoming> incoming_;
  std::vector<Outgoing> outgoing_;
  std::vector<int> input_sinks_;         // sinks of earlier stages' values
  int sinks_ = 0;                        // how many gradients a backward brings
  std::vector<graph::ValueId> entered_;  // values that may be in the environment after a forward
  graph::Environment environment_;       // environment of the forward that runs
  std::vector<InFlight> in_flight_;      // state of each microbatch
};

}  // namespace smp::pipeline
