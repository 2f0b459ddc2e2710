// SPDX-License-Identifier: Apache-2.0
#include "partitioner/cost.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "graph/flops.h"
#include "graph/requires_grad.h"
#include "partitioner/data_flow.h"

namespace smp::partitioner {
namespace {

using graph::Cost;
using graph::Graph;
using graph::Operator;
using graph::ValueId;
using graph::ValueKind;

/// Identifies an operator across captures of the same function with other shapes.
using OperatorKey = std::tuple<std::string, std::string, int>;

/// The key of each operator, in program order.
std::vector<OperatorKey> operator_keys(const Graph& graph) {
  std::map<std::pair<std::string, std::string>, int> seen;
  std::vector<OperatorKey> keys;
  keys.reserve(graph.operators.size());
  for (const Operator& op : graph.operators) {
    std::string name = op.name();
    const int occurrence = seen[{op.scope, name}]++;
    keys.emplace_back(op.scope, std::move(name), occurrence);
  }
  return keys;
}

int64_t result_bytes(const Graph& graph, const Operator& op) {
  int64_t bytes = 0;
  for_each_result(op, [&](ValueId value) { bytes += graph.values[value].meta.nbytes(); });
  return bytes;
}

/// Bytes of the results that do not lie in an argument's storage.
int64_t own_result_bytes(const Graph& graph, const Operator& op) {
  std::vector<int> argument_sets;
  for_each_argument(op,
                    [&](ValueId value) { argument_sets.push_back(graph.values[value].alias_set); });
  int64_t bytes = 0;
  for_each_result(op, [&](ValueId value) {
    const int set = graph.values[value].alias_set;
    const bool shared =
        std::find(argument_sets.begin(), argument_sets.end(), set) != argument_sets.end();
    if (!shared) bytes += graph.values[value].meta.nbytes();
  });
  return bytes;
}

double flops_us(const Graph& graph, const Operator& op, const Compute& compute) {
  const double flops = graph::operator_flops(graph, op);
  if (flops == 0) return 0;
  const bool is_half = at::elementSize(graph.values[op.results[0]].meta.dtype) <= 2;
  return flops / (is_half ? compute.half_flops_per_us : compute.flops_per_us);
}

Cost estimate(const Graph& graph, const Operator& op, const Compute& compute) {
  Cost cost;
  cost.output_bytes = own_result_bytes(graph, op);
  const bool view = cost.output_bytes == 0 && op.writes.empty();
  int64_t moved = 0;
  if (!view) {
    moved = result_bytes(graph, op);
    for_each_argument(op, [&](ValueId value) { moved += graph.values[value].meta.nbytes(); });
  }
  cost.forward_us = compute.call_us + std::max(static_cast<double>(moved) / compute.bytes_per_us,
                                               flops_us(graph, op, compute));
  if (graph.trains() && graph::records_history(graph, op)) {
    cost.backward_us = 2 * cost.forward_us;
    cost.saved_bytes = cost.output_bytes;
  }
  return cost;
}

Cost scale(const Cost& measured, double ratio) {
  Cost cost = measured;
  cost.forward_us *= ratio;
  cost.backward_us *= ratio;
  cost.saved_bytes = static_cast<int64_t>(static_cast<double>(measured.saved_bytes) * ratio);
  return cost;
}

}  // namespace

double operator_time_us(const Graph& graph, const Operator& op) {
  return op.cost.forward_us + (graph.trains() ? op.cost.backward_us : 0.0);
}

std::vector<int64_t> parameter_bytes(const Graph& graph) {
  std::vector<int64_t> bytes(graph.operators.size(), 0);
  std::vector<bool> counted(graph.values.size(), false);
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    for_each_argument(graph.operators[i], [&](ValueId value) {
      if (graph.values[value].kind != ValueKind::kParameter || counted[value]) return;
      counted[value] = true;
      bytes[i] += graph.values[value].meta.nbytes();
    });
  }
  return bytes;
}

std::vector<double> operator_costs(const Graph& graph, double memory_weight) {
  SMP_CHECK_WITH(ConfigError, memory_weight >= 0 && memory_weight <= 1,
                 "partition: memory_weight: expected a number from 0 (time only) to 1 (memory "
                 "only), got ",
                 memory_weight, ".");
  const size_t size = graph.operators.size();
  const std::vector<int64_t> parameters = parameter_bytes(graph);
  std::vector<double> memory(size), time(size);
  double total_memory = 0, total_time = 0;
  for (size_t i = 0; i < size; ++i) {
    const Operator& op = graph.operators[i];
    memory[i] = static_cast<double>(parameters[i] + op.cost.saved_bytes);
    time[i] = operator_time_us(graph, op);
    total_memory += memory[i];
    total_time += time[i];
  }
  const double memory_scale = total_memory > 0 ? memory_weight / total_memory : 0;
  const double time_scale = total_time > 0 ? (1 - memory_weight) / total_time : 0;
  if (memory_scale == 0 && time_scale == 0) {
    return std::vector<double>(size, 1.0 / static_cast<double>(size));
  }
  std::vector<double> costs(size);
  for (size_t i = 0; i < size; ++i) costs[i] = memory_scale * memory[i] + time_scale * time[i];
  return costs;
}

void estimate_times(Graph& graph, const Compute& compute) {
  for (Operator& op : graph.operators) {
    const Cost estimated = estimate(graph, op, compute);
    op.cost.forward_us = estimated.forward_us;
    op.cost.backward_us = estimated.backward_us;
  }
}

void estimate_costs(Graph& graph, const Graph* measured, const Compute& compute) {
  std::map<OperatorKey, const Operator*> known;
  if (measured != nullptr) {
    const std::vector<OperatorKey> keys = operator_keys(*measured);
    for (size_t i = 0; i < keys.size(); ++i) known[keys[i]] = &measured->operators[i];
  }
  const std::vector<OperatorKey> keys = operator_keys(graph);
  for (size_t i = 0; i < keys.size(); ++i) {
    Operator& op = graph.operators[i];
    const auto match = known.find(keys[i]);
    if (match == known.end()) {
      op.cost = estimate(graph, op, compute);
      continue;
    }
    const auto before = static_cast<double>(result_bytes(*measured, *match->second));
    const auto now = static_cast<double>(result_bytes(graph, op));
    op.cost = scale(match->second->cost, before > 0 ? now / before : 1.0);
    op.cost.output_bytes = own_result_bytes(graph, op);
  }
}

}  // namespace smp::partitioner
