// SPDX-License-Identifier: Apache-2.0
#include "pipeline/predicted_costs.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "graph/alias_analysis.h"
#include "graph/visit.h"
#include "pipeline/kept_for_weights.h"

namespace smp::pipeline {
namespace {

using graph::Graph;
using partitioner::Plan;

/// The operator that makes some memory, where that is one.
int maker_of(const Graph& graph, const graph::AliasAnalysis::Set& memory) {
  int maker = graph.values[memory.values.front()].producer;
  for (graph::ValueId id : memory.values) maker = std::min(maker, graph.values[id].producer);
  return maker;
}

/// Whether an operator of the stage that makes a value's storage makes something else from it. If
/// not, the stage lets go of it when it is sent, and where it arrives it counts again.
bool is_used_where_made(const Graph& graph, const Plan& plan, const graph::Value& value,
                        int stage) {
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const graph::Operator& op = graph.operators[i];
    if (plan.stage_of_operator[i] != stage) continue;
    const auto is_other = [&](graph::ValueId id) {
      return id != graph::kUndefined && graph.values[id].alias_set != value.alias_set;
    };
    bool reads = false;
    graph::for_each_argument(op, [&](graph::ValueId id) { reads |= !is_other(id); });
    if (reads && std::any_of(op.results.begin(), op.results.end(), is_other)) return true;
  }
  return false;
}

class CostPredictor {
 public:
  CostPredictor(const Graph& graph, const Plan& plan, const std::vector<Edge>& edges,
                const partitioner::CostModel& costs)
      : graph_(graph),
        aliases_(graph),
        plan_(plan),
        edges_(edges),
        links_(costs),
        backward_of_stage_(backward_of_stage(graph, plan, edges)) {
    costs_.forward.assign(plan.stages(), 0);
    costs_.backward_input.assign(plan.stages(), 0);
    costs_.backward_weight.assign(plan.stages(), 0);
    costs_.kept.assign(plan.stages(), 0);
  }

  StageCosts run(const partitioner::Prediction& prediction) {
    add_operators();
    move_to_weights();
    add_messages();
    add_tensors();
    for (int s = 0; s < plan_.stages(); ++s) {
      const auto& stage = prediction.stages[s];
      costs_.kept[s] = static_cast<double>(stage.activations) / std::max(stage.in_flight, 1);
    }
    let_go_of_sent();
    keep_for_weights();
    leave_out_backwards();
    for (int s = 0; s < plan_.stages(); ++s) {
      costs_.backward.push_back(costs_.backward_input[s] + costs_.backward_weight[s]);
    }
    return std::move(costs_);
  }

 private:
  void add_operators() {
    for (size_t i = 0; i < graph_.operators.size(); ++i) {
      const graph::Operator& op = graph_.operators[i];
      const int stage = plan_.stage_of_operator[i];
      costs_.forward[stage] += op.cost.forward_us;
      if (!graph_.trains()) continue;
      const double weights = op.reads_parameter ? op.cost.backward_us / 2 : 0;
      costs_.backward_weight[stage] += weights;
      costs_.backward_input[stage] += op.cost.backward_us - weights;
    }
    for (const auto& again : plan_.recomputed) {
      costs_.forward[again.stage] += graph_.operators[again.operator_index].cost.forward_us;
    }
  }

  /// Where no earlier stage waits for gradients.
  void move_to_weights() {
    for (int s = 0; s < plan_.stages(); ++s) {
      if (sends_gradients(s)) continue;
      costs_.backward_weight[s] += costs_.backward_input[s];
      costs_.backward_input[s] = 0;
    }
  }

  /// Removes values that the prediction counts where they are made, although only the stage that
  /// they go to keeps them.
  void let_go_of_sent() {
    if (!graph_.trains()) return;  // nothing is kept
    std::set<int> counted;         // alias sets
    std::map<int, int64_t> saved;  // bytes left of those that a maker is taken to keep
    for (const auto& hop : plan_.transfers) {
      const graph::Value& value = graph_.values[hop.value];
      const int maker = maker_of(graph_, aliases_.of(hop.value));
      if (maker < 0 || plan_.stage_of_operator[maker] != hop.from) continue;
      if (plan_.rank_of_stage[hop.from] == plan_.rank_of_stage[hop.to]) continue;
      if (!counted.insert(value.alias_set).second) continue;
      if (is_used_where_made(graph_, plan_, value, hop.from)) continue;
      int64_t& left = saved.emplace(maker, graph_.operators[maker].cost.saved_bytes).first->second;
      const int64_t sent = std::min<int64_t>(left, value.meta.nbytes());
      left -= sent;
      costs_.kept[hop.from] -= static_cast<double>(sent);
    }
  }

  /// Whether some earlier stage waits for gradients.
  bool sends_gradients(int stage) const {
    return std::any_of(edges_.begin(), edges_.end(), [&](const Edge& edge) {
      return edge.to == stage && !(edge.gradients.empty() && edge.replicas.empty());
    });
  }

  /// A stage that sends no gradients does all in the second half.
  void keep_for_weights() {
    for (const KeptForWeights& stage : kept_for_weights(graph_, plan_, edges_)) {
      const size_t s = costs_.kept_for_weights.size();
      const double saved = sends_gradients(static_cast<int>(s)) ? stage.saved : costs_.kept[s];
      costs_.kept_for_weights.push_back(saved + stage.gradients);
      costs_.gradients_for_weights.push_back(stage.gradients);
    }
  }

  /// Clears the costs of stages without a backward, which keep nothing for one.
  void leave_out_backwards() {
    if (!graph_.trains()) return;
    for (int s = 0; s < plan_.stages(); ++s) {
      if (backward_of_stage_[s]) continue;
      for (auto* costs : {&costs_.backward_input, &costs_.backward_weight, &costs_.kept,
                          &costs_.kept_for_weights, &costs_.gradients_for_weights}) {
        (*costs)[s] = 0;
      }
    }
  }

  void add_messages() {
    for (const Edge& edge : edges_) {
      if (plan_.rank_of_stage[edge.from] == plan_.rank_of_stage[edge.to]) continue;
      if (edge.values.empty()) continue;
      const double message = partitioner::message_us(link(edge.from, edge.to), /*trains=*/false);
      add_on_both_ends(costs_.forward, edge.from, edge.to, message);
      if (graph_.trains()) add_on_both_ends(costs_.backward_input, edge.from, edge.to, message);
    }
  }

  void add_tensors() {
    for (const auto& hop : plan_.transfers) {
      if (plan_.rank_of_stage[hop.from] == plan_.rank_of_stage[hop.to]) continue;
      const double us =
          partitioner::transfer_us(link(hop.from, hop.to), graph_.values[hop.value].meta.nbytes(),
                                   /*needs_gradient=*/false);
      add_on_both_ends(costs_.forward, hop.from, hop.to, us);
      if (hop.needs_gradient) add_on_both_ends(costs_.backward_input, hop.from, hop.to, us);
    }
  }

  const partitioner::Link& link(int from, int to) const {
    return links_.between(plan_.rank_of_stage[from], plan_.rank_of_stage[to]);
  }

  static void add_on_both_ends(std::vector<double>& of, int from, int to, double us) {
    of[from] += us;
    of[to] += us;
  }

  const Graph& graph_;
  const graph::AliasAnalysis aliases_;
  const Plan& plan_;
  const std::vector<Edge>& edges_;
  const partitioner::CostModel& links_;
  const std::vector<bool> backward_of_stage_;
  StageCosts costs_;
};

}  // namespace

StageCosts predicted_costs(const Graph& graph, const Plan& plan, const std::vector<Edge>& edges,
                           const partitioner::Prediction& prediction,
                           const partitioner::CostModel& costs) {
  return CostPredictor(graph, plan, edges, costs).run(prediction);
}

}  // namespace smp::pipeline
