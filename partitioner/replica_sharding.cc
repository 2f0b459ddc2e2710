// SPDX-License-Identifier: Apache-2.0
#include "partitioner/replica_sharding.h"

#include <algorithm>
#include <set>
#include <vector>

#include "partitioner/units.h"

namespace smp::partitioner {

using graph::Graph;
using graph::Value;
using graph::ValueId;

namespace {

using Units = std::vector<std::vector<ValueId>>;

/// The bytes of the largest unit, or of two that follow each other where both are whole together.
int64_t whole_bytes(const Graph& graph, const Units& units, int64_t most_elements) {
  int64_t most = 0, bytes_before = 0, elements_before = 0;
  for (const auto& unit : units) {
    int64_t bytes = 0, elements = 0;
    for (ValueId id : unit) {
      bytes += graph.values[id].meta.nbytes();
      elements += graph.values[id].meta.numel();
    }
    const bool is_ahead = elements_before + elements <= most_elements;
    most = std::max(most, bytes + (is_ahead ? bytes_before : 0));
    bytes_before = bytes;
    elements_before = elements;
  }
  return most;
}

int64_t sum_bytes(const Graph& graph, const Units& units, int64_t bucket, int microbatches) {
  std::set<ValueId> parameters;
  for (const auto& unit : units) parameters.insert(unit.begin(), unit.end());
  int64_t bytes = 0, elements = 0, largest = 0;
  for (ValueId id : parameters) {
    const Value& parameter = graph.values[id];
    if (!parameter.meta.requires_grad) continue;
    bytes += gradient_bytes(parameter);
    elements += parameter.meta.numel();
    largest = std::max(largest, gradient_bytes(parameter));
  }
  if (microbatches > 1 || elements <= bucket) return bytes;
  // A larger parameter has a bucket for itself.
  return std::min(bytes, 2 * std::max(largest, bytes / elements * bucket));
}

}  // namespace

int64_t gradient_bytes(const Value& parameter) {
  const at::ScalarType type = parameter.meta.dtype;
  const bool is_half = type == at::kHalf || type == at::kBFloat16;
  return parameter.meta.numel() * static_cast<int64_t>(elementSize(is_half ? at::kFloat : type));
}

bool ReplicaSharding::divides(const Value& parameter) const {
  return parameters() > 1 && parameter.kind == graph::ValueKind::kParameter &&
         parameter.meta.numel() >= smallest();
}

int64_t working_bytes(const Graph& graph, const ReplicaSharding& sharding, int microbatches) {
  if (sharding.parameters() == 1) return 0;
  const UnitOptions options{[&](const Value& value) { return sharding.divides(value); },
                            sharding.live()};
  const std::vector<int> one_stage(graph.operators.size(), 0);
  const Units units =
      parameters_of_units(graph, find_units(graph, one_stage, /*regions=*/{}, options), options);
  const int64_t whole = whole_bytes(graph, units, sharding.live());
  return graph.trains() ? whole + sum_bytes(graph, units, sharding.bucket(), microbatches) : whole;
}

}  // namespace smp::partitioner
