// SPDX-License-Identifier: Apache-2.0
#include "partitioner/order.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "graph/alias_analysis.h"
#include "graph/leaf.h"
#include "partitioner/cost.h"
#include "partitioner/data_flow.h"
#include "partitioner/gradient_flow.h"
#include "partitioner/recompute.h"

namespace smp::partitioner {

using graph::Graph;
using graph::kUndefined;
using graph::Operator;
using graph::Value;
using graph::ValueId;
using graph::ValueKind;

namespace {

using Kind = OrderRule::Kind;

/// For each value the first id of its tensor: an operator may return the very tensor that it was
/// given.
std::vector<ValueId> first_ids(const Graph& graph) {
  std::vector<ValueId> first(graph.values.size());
  std::iota(first.begin(), first.end(), 0);
  for (const Operator& op : graph.operators) {
    for_each_same_tensor(
        op, [&](ValueId result, ValueId argument) { first[result] = first[argument]; });
  }
  return first;
}

class RuleFinder {
 public:
  explicit RuleFinder(const Graph& graph) : graph_(graph) {}

  std::vector<OrderRule> run() {
    add_data();
    add_storages();
    add_gradients();
    add_calls();
    std::stable_sort(rules_.begin(), rules_.end(),
                     [](const OrderRule& a, const OrderRule& b) { return a.after < b.after; });
    return std::move(rules_);
  }

 private:
  int operators() const { return static_cast<int>(graph_.operators.size()); }

  void add_data() {
    for (int i = 0; i < operators(); ++i) {
      for_each_argument(graph_.operators[i], [&](ValueId value) {
        const int producer = graph_.values[value].producer;
        if (producer >= 0) rules_.push_back({producer, i, Kind::kData, value});
      });
    }
  }

  /// Views see writes, and autograd remakes their history after one, so whatever touches a written
  /// storage keeps its place among the others that do.
  void add_storages() {
    const graph::AliasAnalysis aliases(graph_);
    std::vector<int> last(graph_.alias_sets, -1);
    for (int i = 0; i < operators(); ++i) {
      const auto touch_set = [&](int set) {
        if (set < 0 || !aliases.set(set).is_written()) return;
        if (last[set] >= 0 && last[set] != i) {
          rules_.push_back({last[set], i, Kind::kStorage, aliases.set(set).values.front()});
        }
        last[set] = i;
      };
      const auto touch = [&](ValueId value) { touch_set(graph_.values[value].alias_set); };
      for_each_argument(graph_.operators[i], touch);
      for_each_result(graph_.operators[i], touch);
      for (int set : graph_.operators[i].writes) touch_set(set);
    }
  }

  void add_gradients() {
    const GradientFlow gradients(graph_);
    const std::vector<ValueId> first_id = first_ids(graph_);
    std::vector<std::vector<int>> users(graph_.values.size());
    for (size_t v = 0; v < graph_.values.size(); ++v) {
      const auto value = static_cast<ValueId>(v);
      const std::vector<int>& uses = gradients.gradient_uses(value);
      std::vector<int>& all = users[first_id[v]];
      all.insert(all.end(), uses.begin(), uses.end());
    }
    for (size_t v = 0; v < users.size(); ++v) {
      std::sort(users[v].begin(), users[v].end());
      for (size_t i = 1; i < users[v].size(); ++i) {
        if (users[v][i - 1] == users[v][i]) continue;
        rules_.push_back({users[v][i - 1], users[v][i], Kind::kGradient, static_cast<ValueId>(v)});
      }
    }
  }

  void add_calls() {
    int last = -1;
    for (int i = 0; i < operators(); ++i) {
      const Operator& op = graph_.operators[i];
      if (!graph::is_leaf(op.handle) && !op.results.empty()) continue;
      if (last >= 0) rules_.push_back({last, i, Kind::kCall, kUndefined});
      last = i;
    }
  }

  const Graph& graph_;
  std::vector<OrderRule> rules_;
};

std::string describe(const Graph& graph, const OrderRule& rule) {
  const std::string pair = fmt::format("{} runs before {}", describe_operator(graph, rule.after),
                                       describe_operator(graph, rule.before));
  switch (rule.kind) {
    case Kind::kData:
      return fmt::format("{}, whose result it reads", pair);
    case Kind::kStorage:
      return fmt::format("{}, but both use a storage that is written, that of {}", pair,
                         describe_value(graph, rule.value));
    case Kind::kGradient:
      return fmt::format("{}, but the gradient of {} is the sum of theirs in this order", pair,
                         describe_value(graph, rule.value));
    default:
      return fmt::format("{}, but calls keep their order", pair);
  }
}

/// Where each operator is in an order.
std::vector<int> positions(const Order& order) {
  std::vector<int> result(order.size());
  for (size_t p = 0; p < order.size(); ++p) result[order[p]] = static_cast<int>(p);
  return result;
}

bool is_permutation(const Order& order, size_t operators) {
  std::vector<bool> seen(operators, false);
  for (int op : order) {
    if (op < 0 || op >= static_cast<int>(operators) || seen[op]) return false;
    seen[op] = true;
  }
  return order.size() == operators;
}

/// The time of transferring a result, forward and, if it has one, its gradient back; or of making
/// it again, if that is less.
double crossing_us(const Graph& graph, const Value& value, const Link& link, bool gradient,
                   bool repeatable) {
  const double us = link.of_tensor(value.meta.nbytes()) * (gradient ? 2 : 1);
  return repeatable ? std::min(us, graph.operators[value.producer].cost.forward_us) : us;
}

void add_tensors(const Graph& graph, const Link& link, OrderProblem& problem) {
  const std::vector<bool> repeatable = repeatable_operators(graph);
  const std::vector<std::vector<int>> uses = value_uses(graph);
  const GradientFlow gradients(graph);
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const Value& value = graph.values[v];
    const std::vector<int>& of_gradient = gradients.gradient_uses(static_cast<ValueId>(v));
    OrderProblem::Tensor tensor;
    if (value.kind == ValueKind::kResult && !uses[v].empty()) {
      tensor.cost =
          crossing_us(graph, value, link, !of_gradient.empty(), repeatable[value.producer]);
      tensor.touches = uses[v];
      if (tensor.touches.front() != value.producer) tensor.touches.push_back(value.producer);
    } else if (value.kind == ValueKind::kParameter && of_gradient.size() > 1) {
      tensor.cost = link.of_tensor(value.meta.nbytes());  // the gradient of a replica
      tensor.touches = of_gradient;
    } else {
      continue;
    }
    problem.tensors.push_back(std::move(tensor));
  }
}

/// For each operator the highest rank among the owners of tensors that it is the first to use; -1:
/// none.
std::vector<int> ranks_of_owners(const Graph& graph, const Owners& owner) {
  std::vector<int> rank_of_set(graph.alias_sets, -1);
  for (const Value& value : graph.values) {
    if (!has_owner(value) || value.alias_set < 0) continue;
    const auto found = owner.find(value.name);
    if (found != owner.end()) rank_of_set[value.alias_set] = found->second;
  }
  std::vector<int> ranks;
  for (const Operator& op : graph.operators) {
    int rank = -1;
    std::vector<int> used;
    for_each_argument(op, [&](ValueId value) {
      if (graph.values[value].alias_set >= 0) used.push_back(graph.values[value].alias_set);
    });
    for (int set : used) rank = std::max(rank, rank_of_set[set]);
    for (int set : used) rank_of_set[set] = -1;
    ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

std::vector<OrderRule> order_rules(const Graph& graph) { return RuleFinder(graph).run(); }

core::Refusal why_illegal_order(const Graph& graph, const Order& order) {
  if (order.empty()) return std::nullopt;
  if (!is_permutation(order, graph.operators.size())) {
    return fmt::format("it does not name each of the {} operators once", graph.operators.size());
  }
  const std::vector<int> position = positions(order);
  for (const OrderRule& rule : order_rules(graph)) {
    if (position[rule.before] > position[rule.after]) return describe(graph, rule);
  }
  return std::nullopt;
}

Graph reordered(const Graph& graph, const Order& order) {
  if (order.empty()) return graph;
  SMP_INTERNAL_ASSERT(is_permutation(order, graph.operators.size()), "not an order of the graph");
  Graph result = graph;
  const std::vector<int> position = positions(order);
  for (size_t p = 0; p < order.size(); ++p) result.operators[p] = graph.operators[order[p]];
  for (Value& value : result.values) {
    if (value.producer >= 0) value.producer = position[value.producer];
  }
  return result;
}

std::shared_ptr<const Graph> in_order(std::shared_ptr<const Graph> graph, const Order& order) {
  if (order.empty()) return graph;
  return std::make_shared<const Graph>(reordered(*graph, order));
}

int moved_operators(const Order& order) {
  std::vector<int> ascending;  // the least last element of an ascending subsequence of each length
  for (int op : order) {
    const auto place = std::lower_bound(ascending.begin(), ascending.end(), op);
    if (place == ascending.end()) {
      ascending.push_back(op);
    } else {
      *place = op;
    }
  }
  return static_cast<int>(order.size() - ascending.size());
}

OrderProblem order_problem(const Graph& graph, int stages, double memory_weight, const Link& link) {
  OrderProblem problem;
  problem.stages = stages;
  problem.weight = operator_costs(graph, memory_weight);
  problem.before.resize(graph.operators.size());
  for (const OrderRule& rule : order_rules(graph)) {
    problem.before[rule.after].push_back(rule.before);
  }
  for (std::vector<int>& before : problem.before) {
    std::sort(before.begin(), before.end());
    before.erase(std::unique(before.begin(), before.end()), before.end());
  }
  add_tensors(graph, link, problem);
  return problem;
}

Order order_by_owner(const Graph& graph, const Owners& owner) {
  const int operators = static_cast<int>(graph.operators.size());
  std::vector<int> rank = ranks_of_owners(graph, owner);
  std::vector<std::vector<int>> after(operators);
  for (const OrderRule& rule : order_rules(graph)) {
    rank[rule.after] = std::max(rank[rule.after], rank[rule.before]);
    after[rule.before].push_back(rule.after);
  }
  // Operators that depend on no owner's operator go to the first that needs them.
  for (int op = operators - 1; op >= 0; --op) {
    if (rank[op] >= 0) continue;
    rank[op] = op + 1 < operators ? rank[op + 1] : 0;
    for (size_t i = 0; i < after[op].size(); ++i) {
      const int needed = rank[after[op][i]];
      rank[op] = i == 0 ? needed : std::min(rank[op], needed);
    }
  }
  Order order(operators);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return rank[a] < rank[b]; });
  return std::is_sorted(order.begin(), order.end()) ? Order() : order;
}

}  // namespace smp::partitioner
