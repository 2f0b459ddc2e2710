// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "graph/graph.h"

namespace smp::graph {

/// Which values of a graph share memory, whose that is, and who writes it: by alias set, found
/// once. The graph must not change afterwards, and need not outlive it.
class AliasAnalysis {
 public:
  struct Set {
    std::vector<ValueId> values;  ///< ascending
    std::vector<int> writers;     ///< operators, ascending
    /// The first parameter, buffer, input, constant or literal whose memory it is; `kUndefined`:
    /// that of a result, which is gone after the run.
    ValueId base = kUndefined;

    /// Whether other runs, such as those of other microbatches, find the same memory.
    bool outlives_run() const { return base != kUndefined; }
    bool is_written() const { return !writers.empty(); }
    /// Whether an operator from `first` on writes it.
    bool is_written_from(int first) const { return is_written() && writers.back() >= first; }
    int last_writer() const { return is_written() ? writers.back() : -1; }
  };

  explicit AliasAnalysis(const Graph& graph);

  const Set& set(int alias_set) const { return sets_.at(alias_set); }
  /// That of a value; an empty one for a value without memory.
  const Set& of(ValueId value) const;
  const std::vector<Set>& sets() const& { return sets_; }
  void sets() && = delete;  // a loop over those of a temporary would outlive it

 private:
  std::vector<Set> sets_;
  std::vector<int> set_of_;  // set of each value
};

/// True if a result of the operator lies on the memory of an alias set.
bool has_result_on(const Graph& graph, const Operator& op, int alias_set);

/// True if the operator's effect is seen through its arguments: a result lies on the memory of one
/// (a view, or a write).
bool acts_on_arguments(const Graph& graph, const Operator& op);

}  // namespace smp::graph
