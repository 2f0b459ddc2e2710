// SPDX-License-Identifier: Apache-2.0
#include "graph/graph_map.h"

#include "core/check.h"

namespace smp::graph {
namespace {

template <class Index>
std::vector<std::vector<Index>> through(const std::vector<std::vector<Index>>& first,
                                        const std::vector<std::vector<Index>>& second) {
  std::vector<std::vector<Index>> result(first.size());
  for (size_t i = 0; i < first.size(); ++i) {
    for (Index middle : first[i]) {
      result[i].insert(result[i].end(), second[middle].begin(), second[middle].end());
    }
  }
  return result;
}

/// The places in the second graph of a number that is at `middle` in the first.
std::vector<GraphMap::Number> through(const GraphMap::Number& middle, const GraphMap& second) {
  if (middle.operator_index < 0) return {middle};
  auto result = second.places_of(middle.operator_index, middle.argument);
  for (auto& last : result) {
    if (!middle.change) continue;
    last.change = [first = middle.change, then = last.change](const c10::IValue& value) {
      return then ? then(first(value)) : first(value);
    };
  }
  return result;
}

}  // namespace

GraphMap GraphMap::in_order(const Graph& graph, const std::vector<int>& order) {
  GraphMap map;
  map.operators.resize(graph.operators.size());
  map.values.resize(graph.values.size());
  for (int i = 0; i < static_cast<int>(map.operators.size()); ++i) {
    map.operators[order.empty() ? i : order[i]] = {i};
  }
  for (size_t v = 0; v < map.values.size(); ++v) map.values[v] = {static_cast<ValueId>(v)};
  return map;
}

std::vector<GraphMap::Number> GraphMap::places_of(int operator_index, int argument) const {
  const auto found = numbers.find({operator_index, argument});
  if (found != numbers.end()) return found->second;
  std::vector<Number> result;
  for (int op : operators[operator_index]) result.push_back({op, argument, nullptr, ""});
  return result;
}

std::vector<ConstantOverride> GraphMap::constants(
    const std::vector<ConstantOverride>& changes) const {
  std::vector<ConstantOverride> result;
  for (const ConstantOverride& change : changes) {
    for (const Number& place : places_of(change.operator_index, change.argument)) {
      SMP_CHECK_WITH(UsageError, place.operator_index >= 0, "a number in operator ", place.name,
                     " is now ", constant_to_string(change.value),
                     ", but it decided how tensor parallelism divided the operator. Keep it as it "
                     "was in the first step, or give steps of another kind a step function of "
                     "their own");
      result.push_back({place.operator_index, place.argument,
                        place.change ? place.change(change.value) : change.value});
    }
  }
  return result;
}

std::vector<ContentOverride> GraphMap::contents(const std::vector<ContentOverride>& changes) const {
  std::vector<ContentOverride> result;
  for (const ContentOverride& change : changes) {
    for (ValueId value : values[change.value]) result.push_back({value, change.content});
  }
  return result;
}

std::vector<std::vector<at::Tensor>> GraphMap::outputs(
    std::vector<std::vector<at::Tensor>> made) const {
  const auto each = static_cast<size_t>(factor);
  std::vector<std::vector<at::Tensor>> result(made.size() / each);
  for (size_t position = 0; position < result.size(); ++position) {
    for (size_t m = 0; m < made[position * each].size(); ++m) {
      for (size_t part = 0; part < each; ++part) {
        result[position].push_back(std::move(made[position * each + part][m]));
      }
    }
  }
  return result;
}

GraphMap compose(const GraphMap& first, const GraphMap& second) {
  SMP_INTERNAL_ASSERT(first.factor == 1 || second.factor == 1,
                      "microbatches that run as one were coalesced again");
  GraphMap result{first.factor * second.factor,
                  through(first.operators, second.operators),
                  through(first.values, second.values),
                  {}};
  const auto add = [&](int op, int argument) {
    const auto [entry, is_new] = result.numbers.try_emplace({op, argument});
    if (!is_new) return;
    for (const auto& middle : first.places_of(op, argument)) {
      for (auto& last : through(middle, second)) entry->second.push_back(std::move(last));
    }
  };
  for (const auto& [place, unused] : first.numbers) add(place.first, place.second);
  for (size_t op = 0; op < first.operators.size(); ++op) {
    for (int middle : first.operators[op]) {
      auto listed = second.numbers.lower_bound({middle, 0});
      for (; listed != second.numbers.end() && listed->first.first == middle; ++listed) {
        add(static_cast<int>(op), listed->first.second);
      }
    }
  }
  return result;
}

ExecutionMode mode_before(const Graph& graph, ValueId value, const Operator* reader) {
  const int producer = graph.values[value].producer;
  const ExecutionMode made = producer < 0 ? ExecutionMode() : graph.operators[producer].mode;
  ExecutionMode mode = reader == nullptr ? made : reader->mode;
  mode.inference = made.inference;
  mode.grad = !made.inference;
  mode.below_autograd = mode.below_views = false;
  return mode;
}

}  // namespace smp::graph
