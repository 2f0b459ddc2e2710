// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/refusal.h"
#include "graph/graph.h"
#include "graph/graph_map.h"
#include "smp/nn/layout.h"
#include "smp/nn/parameter_split.h"
#include "smp/tensor_parallelism_options.h"

namespace smp::nn::rewrite {

/// Permissions of `divide`, and the costs with which it reckons.
struct DivideOptions {
  int ranks = 1;  ///< size of the tensor-parallel group
  /// Names of the parameters whose modules are marked for tensor parallelism.
  std::set<std::string> allowed;
  /// How parameters are divided already, by earlier graphs: followed whatever it costs.
  std::map<std::string, ParameterSplit> fixed;
  /// Every weight that can be divided is: the predicted time decides how, not whether.
  bool insist = false;
  /// The way in which operators compute on the results of each parameter (`AttentionForm`,
  /// `residual_sums`).
  std::map<std::string, TensorParallelismOptions> options_of;
  /// Choose by times that follow from sizes alone, so that every run chooses the same, instead of
  /// by the graph's costs, which may be measured.
  bool estimate = false;
  double bytes_per_us = 5000;  ///< rate at which a rank sends to the others
  double latency_us = 20;      ///< latency of one collective
  /// The cost of a byte of a parameter that a rank holds, for one microbatch: its gradient is
  /// computed, added up and used (four passes at 5 GB/s).
  double parameter_us_per_byte = 0.0008;
  /// Divide the activations between divided layers, too (`optimize: "memory"`).
  bool residual_streams = false;
  /// The gain, for these, from a byte of an activation that a rank need not keep of a
  /// microbatch until its backward pass: five saved make up for one us.
  double activation_us_per_byte = 0.2;
};

/// How a parameter is divided, or why it is not.
struct ParameterDecision {
  std::string name;
  std::vector<int64_t> sizes;
  int64_t bytes = 0;                    ///< bytes of the whole
  std::optional<ParameterSplit> split;  ///< nothing: every rank holds the whole
  core::Refusal why_whole;              ///< nothing: it is divided
  /// A weight of a marked module, of products or an embedding, that stays whole.
  bool skipped = false;
};

/// Activations between divided layers that belong together, element for element: those of the
/// residual stream of a transformer, say.
struct ResidualStreamDecision {
  std::string first;           ///< the module where it begins
  std::string last;            ///< and where it ends, or the last of several like it
  int alike = 1;               ///< so many alike, one after the other
  std::vector<int64_t> sizes;  ///< sizes of the activation that was tried first
  int dim = -1;                ///< along which each rank has its part; -1: every rank has all of it
  core::Refusal why_whole;     ///< nothing: it is divided
};

/// The messages between ranks of the group for one microbatch.
struct Traffic {
  int forward_calls = 0;
  int backward_calls = 0;
  int64_t forward_bytes = 0;   ///< that each rank sends
  int64_t backward_bytes = 0;  ///< that each rank sends

  Traffic& operator+=(const Traffic& other);
};

/// The graph that each rank of a tensor-parallel group runs, on its parts of the parameters. The
/// parts that depend on the rank are inside the operators `smp::tp_*`.
struct DividedGraph {
  graph::Graph graph;
  int ranks = 1;                ///< size of the group
  std::vector<Layout> layouts;  ///< layout of each value of `graph`, sums over the ranks among them
  /// Results of operators that communicate because a module of smp::nn called them, which alone
  /// knows how they lie. The graph takes them for whole.
  std::set<graph::ValueId> made_by_modules;
  /// From the whole graph. A value stands for one as its operator makes it, which may be brought to
  /// another layout at once; numbers that decided how an operator was divided must stay.
  graph::GraphMap map;
  std::map<std::string, ParameterSplit> parameters;  ///< the divided ones
  std::vector<ParameterDecision> decisions;          ///< every parameter, in the graph's order
  /// Decided with `DivideOptions::residual_streams`.
  std::vector<ResidualStreamDecision> residual_streams;
  /// Operators of the whole graph that are computed as `DivideOptions::options_of` says.
  std::set<size_t> computed_otherwise;
  /// Bytes of activations that a rank keeps of a microbatch until its backward pass: predicted from
  /// sizes. The second: if all residual streams were whole.
  int64_t kept_bytes = 0, kept_bytes_with_whole_streams = 0;
  Traffic traffic;
  std::map<std::string, Traffic> traffic_of;  ///< traffic by the operators' scope
  double whole_us = 0;    ///< predicted time of a microbatch, all parameters whole
  double divided_us = 0;  ///< the same as divided
};

/// Why no parameter of the graph can be divided.
core::Refusal why_none_divided(const graph::Graph& whole, const DivideOptions& options);

/// Divides the parameters of a captured graph among the ranks of a tensor-parallel group, where
/// that is predicted to be worth it, and inserts the operators that communicate. A pure function:
/// every rank gets the same graph. See docs/tensor_parallelism.md.
///
/// `whole` has whole parameters; its costs weigh the choice unless `estimate` is set, and those of
/// the result follow from them. Inputs, outputs and the roots of backward are whole. Throws
/// `UsageError` if a parameter that `fixed` names has other sizes, or if a registered rule is
/// wrong.
DividedGraph divide(const graph::Graph& whole, const DivideOptions& options);

/// Throws unless every operator of a divided graph computes, on what the ranks hold, what the
/// layouts of its results say (`is_legal`), and inputs, outputs and roots are whole. `graph` is the
/// divided one, or what a later pass made of it with the same values: another order. `divide`
/// checks its own result.
void check_layouts(const DividedGraph& divided, const graph::Graph& graph);

/// A table of every parameter's division, and of the traffic.
std::string report(const DividedGraph& divided);

}  // namespace smp::nn::rewrite
