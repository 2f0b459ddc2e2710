// SPDX-License-Identifier: Apache-2.0
#include "graph/live_results.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "graph/content.h"
#include "graph/leaf.h"
#include "graph/replay.h"
#include "graph/storage.h"
#include "graph/visit.h"

namespace smp::graph {
namespace {

/// Which operators give the same results in every run.
class ConstantOperators {
 public:
  explicit ConstantOperators(const Graph& graph)
      : graph_(graph), sets_(graph.alias_sets, true), operators_(graph.operators.size(), true) {
    for (const Value& value : graph.values) {
      const bool given = value.kind == ValueKind::kConstant || value.kind == ValueKind::kLiteral;
      if (value.kind != ValueKind::kResult && !given) sets_[value.alias_set] = false;
    }
    // One that is found not to be constant may share memory with earlier ones.
    while (exclude()) {
    }
  }

  bool holds(ValueId id) const { return sets_[graph_.values[id].alias_set]; }
  bool is_constant(size_t index) const { return operators_[index]; }

 private:
  bool exclude() {
    bool changed = false;
    for (size_t i = 0; i < operators_.size(); ++i) {
      if (!operators_[i] || is_constant(graph_.operators[i])) continue;
      changed = true;
      operators_[i] = false;
      for_each_result(graph_.operators[i],
                      [&](ValueId id) { sets_[graph_.values[id].alias_set] = false; });
      for (int alias_set : graph_.operators[i].writes) sets_[alias_set] = false;
    }
    return changed;
  }

  bool is_constant(const Operator& op) const {
    bool constant = op.random_ordinal < 0 && !is_leaf(op.handle);
    for_each_argument(op, [&](ValueId id) { constant = constant && holds(id); });
    return constant;
  }

  const Graph& graph_;
  std::vector<bool> sets_;
  std::vector<bool> operators_;
};

/// The constant operators that lead to the values on `wanted` alias sets, in program order. Adds
/// their inputs to `wanted`.
std::vector<int> leading_to(const Graph& graph, const ConstantOperators& constants,
                            std::vector<bool>& wanted) {
  std::vector<int> operators;
  for (size_t i = graph.operators.size(); i-- > 0;) {
    const Operator& op = graph.operators[i];
    const auto is_wanted = [&](const Value& value) { return wanted[value.alias_set]; };
    bool needed = any_result(graph, op, is_wanted);
    for (int alias_set : op.writes) needed = needed || wanted[alias_set];
    if (!needed || !constants.is_constant(i)) continue;
    operators.push_back(static_cast<int>(i));
    for_each_argument(op, [&](ValueId id) { wanted[graph.values[id].alias_set] = true; });
  }
  std::reverse(operators.begin(), operators.end());
  return operators;
}

}  // namespace

void give_data_to_constants(const Graph& graph, const std::vector<LiveResult>& kept) {
  if (kept.empty()) return;
  const ConstantOperators constants(graph);
  std::vector<bool> wanted(graph.alias_sets, false);
  std::vector<ValueId> values;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;
  for (const LiveResult& result : kept) {
    auto storage = result.storage.lock();
    if (!storage || !constants.holds(result.id)) continue;
    wanted[graph.values[result.id].alias_set] = true;
    values.push_back(result.id);
    storages.push_back(std::move(storage));
  }
  if (values.empty()) return;
  const at::NoGradGuard no_grad;
  Segment segment(graph, leading_to(graph, constants, wanted), values);
  Environment environment(graph.values.size());
  for (size_t id = 0; id < graph.values.size(); ++id) {
    const Value& value = graph.values[id];
    if (value.content.defined() && wanted[value.alias_set])
      environment[id] = clone_content(value.content);
  }
  segment.run(environment, RandomKey());
  for (size_t i = 0; i < values.size(); ++i) {
    if (storages[i]->nbytes() > 0) continue;  // another value on it came first
    give_data(*storages[i], *environment[values[i]].storage().unsafeGetStorageImpl());
  }
}

bool leaves_results(const TraceResult& run) {
  if (run.recorded == nullptr || run.left.empty()) return false;
  const ConstantOperators constants(*run.recorded);
  return std::any_of(run.left.begin(), run.left.end(),
                     [&](ValueId id) { return !constants.holds(id); });
}

}  // namespace smp::graph
