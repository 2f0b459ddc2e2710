// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "graph/tensor_table.h"

namespace smp::graph {

/// Where a run of a step function is, for its errors and for the modules of its operators.
class Location {
 public:
  /// `table` has to live as long.
  Location(std::string step_name, const TensorTable& table)
      : step_name_(std::move(step_name)), table_(table) {}

  /// Notes that the function has called the operator of that number in the graph.
  void note_operator(size_t index);
  void note_read_parameter(const std::string& name) { last_parameter_ = name; }

  const std::string& step_name() const { return step_name_; }
  const TensorTable& table() const { return table_; }
  /// The module that is running, or, where that is not known, of the parameter that was read last.
  std::string module() const;
  /// Whether each operator's module is known, as far as it goes.
  const std::vector<bool>& modules_known() const { return modules_known_; }
  /// Names the step function and the module.
  std::string to_string() const;
  /// Throws a `CaptureError`.
  [[noreturn]] void refuse(const std::string& what, const std::string& remedy) const;

 private:
  const std::string step_name_;
  const TensorTable& table_;
  std::string last_parameter_;
  std::vector<bool> modules_known_;
};

}  // namespace smp::graph
