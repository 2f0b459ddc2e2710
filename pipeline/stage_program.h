// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/refusal.h"
#include "graph/graph.h"
#include "graph/graph_facts.h"
#include "graph/replay.h"
#include "partitioner/plan.h"
#include "pipeline/edges.h"

namespace smp::pipeline {

/// A graph that a plan divides into stages, with all that its stages share. Refers to what it is
/// made of, and belongs to the thread of its stages.
struct PartitionedGraph {
  PartitionedGraph(const graph::Graph& graph, const partitioner::Plan& plan,
                   const std::vector<Edge>& edges)
      : plan(plan),
        edges(edges),
        facts(graph),
        has_backward(backward_of_stage(graph, plan, edges)),
        environment(std::make_unique<graph::Environment>(graph.values.size())) {}

  const partitioner::Plan& plan;
  const std::vector<Edge>& edges;
  const graph::GraphFacts facts;
  const std::vector<bool> has_backward;  ///< one for each stage
  /// The environment of the forward that runs, whatever its stage; empty between forwards. It is as
  /// large as the graph, so hundreds of stages cannot have one each.
  const std::unique_ptr<graph::Environment> environment;
};

/// The part of a graph that is one stage's, as it is for all microbatches: its operators, the
/// values that enter and leave it, and the gradients that its backward brings. A pure value.
struct StageProgram {
  static constexpr int kNoSink = -1;

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
    size_t position;  ///< among the step's inputs
    bool written;     ///< an operator of this stage writes it: the caller's tensor stays
  };
  struct Parameter {
    graph::ValueId value;
    bool owned;
    int sink;
    /// True for a buffer that later microbatches overwrite while a backward still needs its old
    /// value. Each microbatch works on a copy and writes it back.
    bool copied;

    bool gives_gradient() const { return owned && sink != kNoSink; }
  };
  struct Content {
    graph::ValueId value;
    bool written;  ///< whether an operator of this stage writes it: every microbatch gets a copy
  };

  /// `partitioned` outlives it, and the programs of all its stages share it.
  StageProgram(const PartitionedGraph& partitioned, int index);

  /// Describes its inputs, the values that enter and leave it over edges, and the targets of
  /// gradients: a line for each.
  std::string describe() const;

  /// Whether it reads the step's input at this position.
  bool reads_input(size_t position) const;
  /// Whether an operator of the stage writes the value's memory.
  bool writes(graph::ValueId value) const;
  /// The position among `own_edges` of an edge at one end of which is this stage.
  size_t place_of(int edge) const;
  /// Ordinals of its random operators, ascending.
  std::vector<int> random_ordinals() const;
  /// The values that it is given to compute from: see `StageRecord::given`.
  std::vector<graph::ValueId> given() const;

  /// The parameters on whose memory its forward reads; or its backward, in which the operators of
  /// `regions` (per operator of the graph, -1 for none; or empty) run again.
  std::vector<graph::ValueId> read_in_forward() const;
  std::vector<graph::ValueId> read_in_backward(const std::vector<int>& regions) const;

  /// Why its operators cannot be captured as device graphs, as far as is known.
  core::Refusal why_no_device_graphs() const;
  /// Why `Stage::run_again` cannot run this stage.
  core::Refusal why_not_again() const;

  const graph::GraphFacts& facts;
  const graph::Graph& graph;
  const std::vector<Edge>& edges;
  const int index;
  const bool has_backward;  ///< see `backward_of_stage`
  std::vector<int> operators;
  /// Whether some may have the host do more than give the device work, and wait for other ranks:
  /// those that are not libtorch's own (leaves, divided layers).
  bool calls_foreign = false;
  std::vector<graph::BackwardRoot> roots;  ///< those that start on this stage
  std::vector<int> returned;               ///< positions of the graph's outputs complete here
  std::set<int> copied;                    ///< those of them that others go on writing
  std::vector<graph::ValueId> kept;        ///< values that are read when the operators have run
  std::vector<Input> inputs;
  std::vector<Parameter> parameters;  ///< and buffers
  std::vector<Content> contents;      ///< constants and literals
  std::vector<int> own_edges;         ///< ascending; the place of an edge is its position here
  std::vector<Incoming> incoming;
  std::vector<Outgoing> outgoing;
  std::vector<graph::ValueId> consumed;  ///< parameters whose gradients its backwards give
  std::vector<int> input_sinks;          ///< sinks of earlier stages' values
  int sinks = 0;                         ///< how many gradients a backward brings
  std::vector<graph::ValueId> entered;   ///< values that come from outside

 private:
  std::vector<graph::ValueId> parameters_under(const std::set<graph::ValueId>& values) const;
  bool backward_may_need(graph::ValueId value) const;
  bool is_copied(graph::ValueId value) const;
  void find_operators(const partitioner::Plan& plan);
  void find_kept();
  void find_reads(const partitioner::Plan& plan);
  void find_edges();
  void find_incoming(const Edge& edge, size_t place);
  void find_outgoing(const Edge& edge, size_t place);
  void find_consumed();
  int sink_of(graph::ValueId value) const;
};

}  // namespace smp::pipeline
