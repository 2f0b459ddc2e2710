// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graph/graph.h"
#include "graph/hash_log.h"
#include "pipeline/stage_record.h"

namespace smp::runtime {

/// Names the records of stages in the program's order: stages run the graph in the plan's order.
/// Internal.
class RecordedRows {
 public:
  /// `order`: the captured operator of each that runs; empty: in the captured order.
  RecordedRows(const graph::Graph& captured, std::shared_ptr<const graph::Graph> graph,
               std::vector<int> order);

  uint64_t fingerprint() const { return fingerprint_; }

  /// The row of a hashed tensor, if logs have one.
  std::optional<int> row_of(const pipeline::TensorHash& hash) const;
  /// Its place among the results of a microbatch: operators in program order, buffers, then
  /// gradients as a backward pass makes them.
  std::pair<int, int> place_of(const pipeline::TensorHash& hash) const;
  /// For people: "result 0 of operator 17 (aten::linear, in module \"mlp\": f32[8, 16])".
  std::string name_of(const pipeline::TensorHash& hash) const;

  /// Writes the hashes of a step that has run. `global`: the number of a microbatch among those of
  /// all ranks.
  void write(graph::HashLogWriter& log, const std::string& step_function, uint64_t call,
             const pipeline::StepRecords& records,
             const std::function<uint64_t(int microbatch)>& global) const;

 private:
  int captured(int operator_index) const {
    return order_.empty() ? operator_index : order_[operator_index];
  }
  std::string operator_text(int operator_index) const;

  const uint64_t fingerprint_;
  const graph::HashRows rows_;
  const std::shared_ptr<const graph::Graph> graph_;
  const std::vector<int> order_;
};

}  // namespace smp::runtime
