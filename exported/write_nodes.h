// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "exported/export_request.h"
#include "graph/graph.h"

namespace smp::exported {

class WriteScope;

/// Writes operators of captured graphs as nodes of a program.
class NodeWriter {
 public:
  /// `request` outlives it.
  explicit NodeWriter(const ExportRequest& request);

  /// The arguments of the graph's `index`-th operator, which stands in `scope`. Throws
  /// `CaptureError` where one cannot be written, or differs with dynamic sizes in another way than
  /// a size does.
  nlohmann::json arguments(size_t index, WriteScope& scope);

  /// The program's entry for a value.
  nlohmann::json meta(graph::ValueId value) const;

  /// The origin of a node.
  nlohmann::json metadata(const std::string& scope) const;

  /// Floating point numbers that became part of the program: "blocks.0.drop: aten::dropout(p=0.1)".
  const std::vector<std::string>& numbers() const { return numbers_; }

 private:
  nlohmann::json tensors(const graph::Argument& argument, WriteScope& scope) const;
  nlohmann::json constant(size_t index, size_t argument, WriteScope& scope) const;
  c10::IValue wrapped_number_in(const graph::Argument& argument) const;
  bool is_default(size_t index, size_t argument) const;
  c10::IValue explicit_dtype(const graph::Operator& op) const;
  SizeFormula formula(const std::vector<int64_t>& seen, const std::string& what) const;
  void note_number(size_t index, size_t argument);

  const ExportRequest& request_;
  std::vector<std::string> numbers_;
};

/// A node; `inputs` and `outputs` as the schema has them.
nlohmann::json make_node(const std::string& target, const std::string& name, nlohmann::json inputs,
                         nlohmann::json outputs, nlohmann::json metadata);

/// An argument of a node by position.
nlohmann::json positional(const std::string& name, nlohmann::json value);

}  // namespace smp::exported
