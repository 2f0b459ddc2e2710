// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graph/graph.h"
#include "graph/host_data.h"
#include "graph/requires_grad.h"
#include "graph/trace.h"
#include "graph/traced_call.h"

namespace smp::graph {

/// How the inputs of a run differ from those of a graph; empty if they do not.
std::string difference_of_inputs(const std::vector<Value>& inputs, const Graph& graph);

/// Compares a run of a step function with graphs that were captured before. It follows those that
/// have done the same so far; differences from the run are theirs to allow.
class Guard final : public RunGraph {
 public:
  /// Follows the candidates that have these inputs, if there are any.
  Guard(const std::vector<const Graph*>& candidates, const std::vector<Value>& inputs);

  bool follows_any() const { return !live_.empty(); }
  /// One of the graphs that it follows. So far they are all alike.
  const Graph& graph() const override { return *live_[0].graph; }
  const Value& value(ValueId id) const override;
  bool requires_grad(ValueId id) override;
  /// Notes the content, in which the run may differ from the graphs.
  void settle(const HostMemory& memory, bool for_read) override;

  /// Adds a value that no operator made, first seen in the call at hand. It has no alias set until
  /// the graph is known to have it.
  ValueId add(Value value);
  /// Those among the added values that have a content.
  std::vector<std::pair<ValueId, at::Tensor>> added_constants() const;

  /// Whether the operator may be the next one.
  bool expects(const c10::OperatorHandle& op) const;

  /// Leaves the graphs whose next operator is not that of the call. Where all are, it returns how
  /// the last one differs, and goes on following that one up to here.
  std::optional<std::string> compare(const TracedCall& call, const HostData& host_data);
  /// Goes past the next operator, which the call was found to be, and returns it.
  const Operator& advance();
  /// Leaves the graphs where host code has not filled the value; false, and none is left, if that
  /// is none of them.
  bool leave_unless_literal(ValueId id);

  /// The graph that the whole run equals, with the differences; nothing if there is none.
  std::optional<TraceResult> match(const std::vector<ValueId>& outputs,
                                   const std::vector<BackwardRoot>& roots);
  /// How many operators came so far.
  size_t size() const { return next_operator_; }
  /// The run so far: the beginning of the graph, with the differences of this run.
  Graph prefix() const;

 private:
  struct Live {
    const Graph* graph;
    std::vector<ConstantOverride> constants;
    std::vector<ContentOverride> contents;
    std::optional<RequiresGrad> requires_grad;  // those of the graph, once they are asked for
  };

  std::optional<std::string> differs(Live& live, const TracedCall& call,
                                     const HostData& host_data) const;
  const Value* other_added(const Graph& graph) const;
  void note_contents(Live& live) const;
  bool ends_like(const Graph& graph, const std::vector<ValueId>& outputs,
                 const std::vector<BackwardRoot>& roots) const;
  void take_literals(Graph& prefix) const;

  std::vector<Live> live_;
  size_t next_operator_ = 0;
  ValueId value_count_ = 0;                 // number of the graph's values that came so far
  std::vector<Value> added_;                // since the last operator
  std::map<ValueId, at::Tensor> literals_;  // that the run has used; undefined: as captured
};

}  // namespace smp::graph
