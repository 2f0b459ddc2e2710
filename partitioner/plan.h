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

/// A parameter or buffer that a stage reads without owning it. The owner's value is copied there
/// at the start of a step if it may have changed; a gradient travels back per microbatch along
/// `gradient_to`: the next earlier stage that has a gradient of the parameter too, at last the
/// owner. Without a gradient `gradient_to` is the owner.
struct Replica {
  graph::ValueId value = graph::kUndefined;
  int owner = 0;
  int stage = 0;
  int gradient_to = 0;
  bool needs_gradient = false;

  bool operator==(const Replica& other) const;
};

/// Which stage runs which operators, what crosses between stages, and why. Stages are contiguous
/// in program order. Inputs, constants and literals never cross: every rank has them.
struct Plan {
  int stages = 1;
  std::vector<int> stage_of_operator;
  std::vector<std::string> reason_of_operator;  ///< why it is where it is, in a few words
  std::vector<Transfer> transfers;              ///< by value, then along the way
  std::vector<Replica> replicas;                ///< by value, then by stage
  std::map<std::string, int> owner;             ///< of every parameter and buffer the graph reads
  std::vector<int> stage_of_output;             ///< per graph output: where it is complete
  std::vector<int> stage_of_root;               ///< per backward root: where its backward starts

  /// As text: equal plans have equal texts. The reasons are left out.
  std::string to_string() const;
  /// Hash of `to_string()`.
  uint64_t fingerprint() const;
};

}  // namespace smp::partitioner
