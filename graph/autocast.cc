// SPDX-License-Identifier: Apache-2.0
#include "graph/autocast.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "graph/devices.h"
#include "graph/leaf.h"
#include "graph/operator_traits.h"
#include "graph/visit.h"

namespace smp::graph {
namespace {

/// Whether autocast keeps its casts.
bool shares_casts(const ExecutionMode& mode) {
  return mode.autocast_cache && (mode.autocast_cpu || mode.autocast_accelerator);
}

bool same_autocast(const ExecutionMode& a, const ExecutionMode& b) {
  return a.autocast_cpu == b.autocast_cpu && a.autocast_accelerator == b.autocast_accelerator &&
         a.autocast_cpu_dtype == b.autocast_cpu_dtype &&
         a.autocast_accelerator_dtype == b.autocast_accelerator_dtype &&
         a.autocast_cache == b.autocast_cache;
}

/// The operators as the program called them, whatever the order of the graph.
std::vector<int> program_order(const Graph& graph) {
  std::vector<int> order(graph.operators.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return graph.operators[a].first_result < graph.operators[b].first_result;
  });
  return order;
}

/// Whether the autocast under which the operator runs has something to say about it.
bool may_cast(const Operator& op) {
  return (op.mode.autocast_cpu && concerns_autocast(op.handle, at::kCPU)) ||
         (op.mode.autocast_accelerator && concerns_autocast(op.handle, accelerator_type()));
}

/// Whether the operator leaves alone what autocast has cast. Those of others may cast arguments
/// themselves, and then write the copies.
bool leaves_casts(const Operator& op) {
  const auto library = op.handle.operator_name().getNamespace();
  return (library == "aten" || library == "smp") && !is_leaf(op.handle);
}

/// Whether a cast takes longer than to look whether there is one: always where a kernel is
/// launched, on the CPU from about so many elements on.
bool takes_long_to_cast(const TensorMeta& weight) {
  constexpr int64_t kElements = 1 << 14;
  return !weight.device.is_cpu() || weight.numel() >= kElements;
}

bool is_cached(const Value& value) {
  return value.kind == ValueKind::kParameter && value.meta.requires_grad &&
         value.meta.dtype == at::kFloat;
}

}  // namespace

std::vector<int> autocast_scopes(const Graph& graph) {
  std::vector<int> scopes(graph.operators.size(), -1);
  const ExecutionMode* previous = nullptr;
  int scope = -1;
  for (int index : program_order(graph)) {
    const ExecutionMode& mode = graph.operators[index].mode;
    if (shares_casts(mode)) {
      if (previous == nullptr || !same_autocast(*previous, mode)) ++scope;
      scopes[index] = scope;
    }
    previous = &mode;
  }
  return scopes;
}

std::vector<SharedCast> shared_casts(const Graph& graph) {
  if (!graph.trains()) return {};
  const std::vector<int> scopes = autocast_scopes(graph);
  std::map<std::pair<ValueId, int>, SharedCast> casts;
  for (size_t i = 0; i < scopes.size(); ++i) {
    const Operator& op = graph.operators[i];
    if (scopes[i] < 0 || !may_cast(op)) continue;
    const int index = static_cast<int>(i);
    for_each_argument(op, [&](ValueId id) {
      if (!is_cached(graph.values[id])) return;
      casts.try_emplace({id, scopes[i]}, SharedCast{id, index, index}).first->second.last = index;
    });
  }
  std::vector<SharedCast> shared;
  for (const auto& [key, cast] : casts) {
    if (cast.first < cast.last) shared.push_back(cast);
  }
  return shared;
}

std::vector<std::vector<ValueId>> weights_to_cast(const Graph& graph) {
  std::set<int> weights;  // alias sets
  for (const Value& value : graph.values) {
    if (value.kind == ValueKind::kParameter) weights.insert(value.alias_set);
  }
  for (const Operator& op : graph.operators) {
    for (int alias_set : op.writes) weights.erase(alias_set);
  }
  std::vector<std::vector<ValueId>> result(graph.operators.size());
  for (size_t i = 0; i < result.size(); ++i) {
    const Operator& op = graph.operators[i];
    if (!may_cast(op) || !leaves_casts(op)) continue;
    std::set<int> seen;  // alias sets of views, of which nothing is cast
    for_each_result(op, [&](ValueId id) { seen.insert(graph.values[id].alias_set); });
    bool takes_long = false;
    for_each_argument(op, [&](ValueId id) {
      const Value& value = graph.values[id];
      const bool is_weight = value.alias_set >= 0 && weights.count(value.alias_set) > 0;
      if (!is_weight || value.meta.dtype != at::kFloat || seen.count(value.alias_set) > 0) return;
      result[i].push_back(id);
      takes_long |= takes_long_to_cast(value.meta);
    });
    if (!takes_long) result[i].clear();
  }
  return result;
}

}  // namespace smp::graph
