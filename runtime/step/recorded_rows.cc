// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/recorded_rows.h"

#include <c10/util/StringUtil.h>

namespace smp::runtime {

using pipeline::TensorHash;
using Kind = TensorHash::Kind;

RecordedRows::RecordedRows(const graph::Graph& captured, std::shared_ptr<const graph::Graph> graph,
                           std::vector<int> order)
    : fingerprint_(captured.fingerprint()),
      rows_(captured),
      graph_(std::move(graph)),
      order_(std::move(order)) {}

std::optional<int> RecordedRows::row_of(const TensorHash& hash) const {
  if (hash.kind == Kind::kResult) return captured(hash.id);
  if (hash.kind != Kind::kParameterGradient) return std::nullopt;
  const auto found = rows_.of_parameter.find(graph_->values[hash.id].name);
  return found == rows_.of_parameter.end() ? std::nullopt : std::optional(found->second);
}

std::pair<int, int> RecordedRows::place_of(const TensorHash& hash) const {
  return {static_cast<int>(hash.kind), row_of(hash).value_or(hash.id)};
}

std::string RecordedRows::operator_text(int operator_index) const {
  const int row = captured(operator_index);
  return c10::str("operator ", row, " (", rows_.texts[row], ")");
}

std::string RecordedRows::name_of(const TensorHash& hash) const {
  if (hash.kind == Kind::kResult) {
    return c10::str("result ", hash.number, " of ", operator_text(hash.id));
  }
  const graph::Value& value = graph_->values[hash.id];
  if (hash.kind == Kind::kBuffer) return c10::str("buffer \"", value.name, "\", which it writes,");
  if (value.producer >= 0)
    return "the gradient of what it got from " + operator_text(value.producer);
  return c10::str("the gradient of parameter \"", value.name, "\", ", value.meta.to_string(), ",");
}

void RecordedRows::write(graph::HashLogWriter& log, const std::string& step_function, uint64_t call,
                         const pipeline::StepRecords& records,
                         const std::function<uint64_t(int microbatch)>& global) const {
  if (!log.knows(fingerprint_)) log.add_graph(fingerprint_, rows_);
  log.begin_step({step_function, call, fingerprint_});
  for (const auto& [of, record] : records) {
    log.begin_microbatch(global(of.second));
    for (const TensorHash& hash : record.hashes) {
      const auto row = row_of(hash);
      if (row) log.add(*row, static_cast<size_t>(hash.number), hash.hash);
    }
  }
  log.end_step();
}

}  // namespace smp::runtime
