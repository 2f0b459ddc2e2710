// SPDX-License-Identifier: Apache-2.0
#include "partitioner/sharding.h"

#include <algorithm>
#include <vector>

#include "partitioner/data_flow.h"

namespace smp::partitioner {

using graph::Graph;
using graph::Value;
using graph::ValueId;

namespace {

// The number of operators that ParameterWindow gathers ahead (dp/parameter_window.h).
constexpr size_t kAhead = 4;

/// The divided parameters in the order in which operators first read them.
std::vector<const Value*> divided_in_order(const Graph& graph, const Sharding& sharding) {
  std::vector<const Value*> result;
  std::vector<bool> seen(graph.values.size(), false);
  for (const graph::Operator& op : graph.operators) {
    for_each_argument(op, [&](ValueId id) {
      if (seen[id] || !sharding.divides(graph.values[id])) return;
      seen[id] = true;
      result.push_back(&graph.values[id]);
    });
  }
  return result;
}

int64_t whole_bytes(const std::vector<const Value*>& parameters, int64_t most_elements) {
  int64_t most = 0;
  for (size_t first = 0; first < parameters.size(); ++first) {
    // The first is read, however large it is; others are gathered if there is room.
    int64_t bytes = parameters[first]->meta.nbytes();
    int64_t elements = parameters[first]->meta.numel();
    const size_t end = std::min(first + 1 + kAhead, parameters.size());
    for (size_t i = first + 1; i < end; ++i) {
      elements += parameters[i]->meta.numel();
      if (elements > most_elements) break;
      bytes += parameters[i]->meta.nbytes();
    }
    most = std::max(most, bytes);
  }
  return most;
}

int64_t sum_bytes(const std::vector<const Value*>& parameters, int64_t bucket, int microbatches) {
  int64_t bytes = 0, elements = 0, largest = 0;
  for (const Value* parameter : parameters) {
    if (!parameter->meta.requires_grad) continue;
    bytes += gradient_bytes(*parameter);
    elements += parameter->meta.numel();
    largest = std::max(largest, gradient_bytes(*parameter));
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

bool Sharding::divides(const Value& parameter) const {
  return parameters() > 1 && parameter.kind == graph::ValueKind::kParameter &&
         parameter.meta.numel() >= smallest();
}

int64_t working_bytes(const Graph& graph, const Sharding& sharding, int microbatches) {
  const std::vector<const Value*> parameters = divided_in_order(graph, sharding);
  const int64_t whole = whole_bytes(parameters, sharding.live());
  return graph.trains() ? whole + sum_bytes(parameters, sharding.bucket(), microbatches) : whole;
}

}  // namespace smp::partitioner
