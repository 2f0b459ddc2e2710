// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace smp::exported {

/// "aten::add_": "add_".
std::string short_name(const graph::Operator& op);

/// Throws the `CaptureError` of an operator that cannot be written.
[[noreturn]] void refuse(const std::string& file, const graph::Operator& op,
                         const std::string& what, const std::string& remedy);

/// The operators of a graph that an exported program needs, and how their values are used. The
/// graph outlives it.
class ExportPlan {
 public:
  /// Takes the operators that the graph's results, random operators and writes of buffers and
  /// inputs need: those that lead to a backward pass alone are left out. Throws `CaptureError` for
  /// an operator that Python does not have or a program cannot say, which it names; `file` is the
  /// program's name in errors.
  ExportPlan(const graph::Graph& graph, const std::string& file);

  /// Their numbers in the graph, ascending.
  const std::vector<size_t>& operators() const { return operators_; }
  /// The value that an in-place operator has returned once more; the value itself for another.
  graph::ValueId first_of(graph::ValueId value) const { return first_.at(value); }
  /// Whether a needed operator from the `from`-th of the graph on reads the value, or the graph
  /// returns it.
  bool is_used_from(graph::ValueId value, size_t from) const;
  /// Tensors made outside of operators that the program reads, ascending.
  const std::vector<graph::ValueId>& constants() const { return constants_; }
  /// Whether an operator writes the value's memory.
  bool is_written(graph::ValueId value) const;

 private:
  void find_needed(const graph::Graph& graph);
  void find_uses(const graph::Graph& graph);

  const graph::Graph& graph_;
  std::vector<size_t> operators_;
  std::vector<graph::ValueId> first_;
  std::vector<size_t> uses_end_;  // one more than the last operator that reads each value
  std::vector<graph::ValueId> constants_;
  std::vector<bool> written_;  // whether each alias set is written
};

}  // namespace smp::exported
