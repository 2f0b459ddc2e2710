// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "exported/export_plan.h"
#include "exported/export_request.h"
#include "exported/write_nodes.h"
#include "exported/write_values.h"
#include "graph/graph.h"

namespace smp::exported {

/// A function that is being written: that of the program, or of a region in it. A value that a
/// region reads from around it becomes its input, under the same name.
class WriteScope {
 public:
  /// The function of the program. All arguments outlive it.
  WriteScope(const ExportRequest& request, const ExportPlan& plan, const NodeWriter& nodes,
             Names& names);
  /// The function of a region.
  explicit WriteScope(WriteScope& outer);

  /// Declares an input of the program's function.
  void add_input(nlohmann::json input) { inputs_.push_back(std::move(input)); }
  /// Declares a tensor that is made here, or an input of the program's function.
  void define(graph::ValueId value, const std::string& name);
  /// The same of a tensor that no operator reads.
  void define_unread(const std::string& name, const nlohmann::json& meta);
  /// Adds a node.
  void add(nlohmann::json node) { nodes_.push_back(std::move(node)); }

  /// The name of a value here.
  std::string tensor(graph::ValueId value);
  /// The name of a number that follows from the dynamic sizes.
  std::string number(const SizeFormula& size);

  Names& names() { return names_; }
  size_t size() const { return nodes_.size(); }

  /// The arguments of a region's function, in the order of its inputs.
  const std::vector<nlohmann::json>& operands() const { return operands_; }
  /// The whole, as the schema has it.
  nlohmann::json finish(std::vector<nlohmann::json> outputs) const;

 private:
  std::string compute(const SizeFormula& size);
  std::string sized_axis(size_t dynamic_size);
  std::string binary(const char* op, const SizeFormula& a, const SizeFormula& b,
                     const SizeFormula& result);
  nlohmann::json operand(const SizeFormula& size);
  void define_number(const SizeFormula& size, const std::string& name);

  const ExportRequest& request_;
  const ExportPlan& plan_;
  const NodeWriter& node_writer_;
  Names& names_;
  WriteScope* outer_ = nullptr;
  std::map<graph::ValueId, std::string> tensors_;
  std::map<SizeFormula, std::string> numbers_;
  std::vector<nlohmann::json> inputs_, nodes_, operands_;
  nlohmann::json tensor_values_ = nlohmann::json::object();
  nlohmann::json number_values_ = nlohmann::json::object();
};

}  // namespace smp::exported
