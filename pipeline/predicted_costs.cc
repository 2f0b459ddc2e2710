// SPDX-License-Identifier: Apache-2.0
#include "pipeline/predicted_costs.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "graph/alias_analysis.h"
#include "graph/visit.h"
#include "partitioner/units.h"
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
  CostPredictor(const Graph& graph, const Plan& plan, const std::vector<Edge>& edges)
      : graph_(graph),
        aliases_(graph),
        plan_(plan),
        edges_(edges),
        backward_of_stage_(backward_of_stage(graph, plan, edges)) {}

  StageCosts run(const partitioner::Prediction& prediction) {
    std::vector<double> weights = times_of_weights();
    for (int s = 0; s < plan_.stages(); ++s) {
      const auto& stage = prediction.stages[s];
      if (!sends_gradients(s)) weights[s] = stage.backward_us;
      costs_.forward.push_back(stage.forward_us + stage.values_us);
      costs_.backward_input.push_back(stage.backward_us - weights[s] + stage.gradients_us);
      costs_.kept.push_back(static_cast<double>(stage.activations) / std::max(stage.in_flight, 1));
    }
    costs_.backward_weight = std::move(weights);
    let_go_of_sent();
    keep_for_weights();
    leave_out_backwards();
    for (int s = 0; s < plan_.stages(); ++s) {
      costs_.backward.push_back(costs_.backward_input[s] + costs_.backward_weight[s]);
    }
    return std::move(costs_);
  }

 private:
  /// The time of parameters' gradients, by stage.
  std::vector<double> times_of_weights() const {
    std::vector<double> times(plan_.stages(), 0);
    for (size_t i = 0; graph_.trains() && i < graph_.operators.size(); ++i) {
      const graph::Operator& op = graph_.operators[i];
      if (op.reads_parameter) times[plan_.stage_of_operator[i]] += op.cost.backward_us / 2;
    }
    return times;
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
    return std::any_of(edges_.begin(), edges_.end(),
                       [&](const Edge& edge) { return edge.to == stage && edge.needs_gradient(); });
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

  const Graph& graph_;
  const graph::AliasAnalysis aliases_;
  const Plan& plan_;
  const std::vector<Edge>& edges_;
  const std::vector<bool> backward_of_stage_;
  StageCosts costs_;
};

/// Lets stages keep as much between halves as their units do. Each unit splits its own backward, so
/// gradients wait between units, too.
void keep_as_units_do(const Graph& graph, const Plan& plan,
                      const std::vector<int>& unit_of_operator, StageCosts& costs) {
  const Plan units = partitioner::divided_into_units(graph, plan, unit_of_operator);
  // Memory of one microbatch, which depends on nothing else of a step.
  const auto prediction = partitioner::predict(graph, units, partitioner::StepModel());
  const StageCosts of_units = predicted_costs(graph, units, edges_of(graph, units), prediction);
  const std::vector<double> none(plan.stages(), 0);
  costs.kept_for_weights = costs.gradients_for_weights = none;
  int before = -1;
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const int unit = units.stage_of_operator[i], stage = plan.stage_of_operator[i];
    if (std::exchange(before, unit) == unit) continue;
    costs.kept_for_weights[stage] += of_units.kept_for_weights[unit];
    costs.gradients_for_weights[stage] += of_units.gradients_for_weights[unit];
  }
}

}  // namespace

StageCosts predicted_costs(const Graph& graph, const Plan& plan, const std::vector<Edge>& edges,
                           const partitioner::Prediction& prediction) {
  StageCosts costs = CostPredictor(graph, plan, edges).run(prediction);
  const partitioner::Units& units = prediction.units;
  if (units.count() > 0) keep_as_units_do(graph, plan, units.of_operator, costs);
  return costs;
}

}  // namespace smp::pipeline
