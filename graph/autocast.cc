// SPDX-License-Identifier: Apache-2.0
#include "graph/autocast.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "graph/visit.h"

namespace smp::graph {
namespace {

/// Whether autocast keeps its casts.
bool shares_casts(const ExecutionMode& mode) {
  return mode.autocast_cache && (mode.autocast_cpu || mode.autocast_cuda);
}

bool same_autocast(const ExecutionMode& a, const ExecutionMode& b) {
  return a.autocast_cpu == b.autocast_cpu && a.autocast_cuda == b.autocast_cuda &&
         a.autocast_cpu_dtype == b.autocast_cpu_dtype &&
         a.autocast_cuda_dtype == b.autocast_cuda_dtype && a.autocast_cache == b.autocast_cache;
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

/// Whether autocast has something to say about the operator or one that it is made of.
bool may_cast(const Operator& op) {
  using Key = c10::DispatchKey;
  return op.handle.hasKernelForDispatchKey(op.mode.autocast_cpu ? Key::AutocastCPU
                                                                : Key::AutocastCUDA) ||
         op.handle.hasKernelForDispatchKey(Key::CompositeImplicitAutograd);
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

}  // namespace smp::graph
