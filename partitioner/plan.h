// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace smp::partitioner {

/// A value that crosses between two stages for every microbatch, as it is when the stage `from`
/// has run all its operators. A value with several consuming stages travels from its producer to
/// the first of them, from there to the next, and so on; its gradient comes back the same way, so
/// that partial gradients are summed in the order of one process: from the last consumer to the
/// first.
struct Transfer {
  graph::ValueId value = graph::kUndefined;
  int from = 0;
  int to = 0;
  /// True if a gradient comes back from `to` to `from`. Along one value's way it may turn true
  /// (a stage writes the value in place) and false (no later stage is differentiated).
  bool needs_gradient = false;

  bool operator==(const Transfer& other) const;
};

/// A parameter or buffer that a stage reads without owning it. If they are on different ranks the
/// owner's value is copied at the start of a step if it may have changed; a gradient travels back
/// per microbatch along `gradient_to`: the next earlier stage that has a gradient of the parameter
/// too, at last the owner. Without a gradient `gradient_to` is the owner.
struct Replica {
  graph::ValueId value = graph::kUndefined;
  int owner = 0;
  int stage = 0;
  int gradient_to = 0;
  bool needs_gradient = false;

  bool operator==(const Replica& other) const;
};

/// An operator that a stage runs for itself although another stage runs it too: its results need no
/// gradient, follow from values that every rank has, and are cheaper to make again than to send
/// (masks, positions).
struct Recomputed {
  int operator_index = 0;
  int stage = 0;

  bool operator==(const Recomputed& other) const;
};

/// The operators of each stage, the transfers between stages, and the reasons. A stage is a
/// contiguous piece of the program; a rank of the pipeline runs one stage or several (0 -> 1 -> 0).
/// Inputs, constants and literals never cross: every rank has them.
///
/// Operators are counted in the order in which they run. Where that is not the program's, the plan
/// is for the graph in its `order` (partitioner/order.h), not for the graph as it was captured.
struct Plan {
  /// Per operator that runs, its index in the captured graph; empty: they run as captured.
  std::vector<int> order;
  /// The rank of the pipeline that runs each stage; every rank has at least one.
  std::vector<int> rank_of_stage = {0};
  std::vector<int> stage_of_operator;
  std::vector<std::string> reason_of_operator;  ///< why it is where it is, in a few words
  std::vector<Transfer> transfers;              ///< transfers by value, then along the way
  std::vector<Recomputed> recomputed;           ///< recomputed operators by stage, then by operator
  std::vector<Replica> replicas;                ///< replicas by value, then by stage
  std::map<std::string, int> owner;  ///< stage of every parameter and buffer the graph reads
  std::vector<int> stage_of_output;  ///< per graph output: where it is complete
  std::vector<int> stage_of_root;    ///< per backward root: where its backward starts

  int stages() const { return static_cast<int>(rank_of_stage.size()); }

  /// The plan's text: equal plans have equal texts. The reasons are left out.
  std::string to_string() const;
};

}  // namespace smp::partitioner
