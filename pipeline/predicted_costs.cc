#include "pipeline/predicted_costs.h"

#include <algorithm>
#include <cstdint>

namespace smp::pipeline {
namespace {

using graph::Graph;
using partitioner::Plan;

class CostPredictor {
 public:
  CostPredictor(const Graph& graph, const Plan& plan, const std::vector<Edge>& edges)
      : graph_(graph), plan_(plan), edges_(edges) {
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
      const bool waits = std::any_of(edges_.begin(), edges_.end(), [&](const Edge& edge) {
        return edge.to == s && !(edge.gradients.empty() && edge.replicas.empty());
      });
      if (waits) continue;
      costs_.backward_weight[s] += costs_.backward_input[s];
      costs_.backward_input[s] = 0;
    }
  }

  void add_messages() {
    for (const Edge& edge : edges_) {
      if (plan_.rank_of_stage[edge.from] == plan_.rank_of_stage[edge.to]) continue;
      if (edge.values.empty()) continue;
      const double message = partitioner::message_us(/*trains=*/false);
      add_on_both_ends(costs_.forward, edge.from, edge.to, message);
      if (graph_.trains()) add_on_both_ends(costs_.backward_input, edge.from, edge.to, message);
    }
  }

  void add_tensors() {
    for (const auto& hop : plan_.transfers) {
      if (plan_.rank_of_stage[hop.from] == plan_.rank_of_stage[hop.to]) continue;
      const double us = partitioner::transfer_us(graph_.values[hop.value].meta.nbytes(),
                                                 /*needs_gradient=*/false);
      add_on_both_ends(costs_.forward, hop.from, hop.to, us);
      if (hop.needs_gradient) add_on_both_ends(costs_.backward_input, hop.from, hop.to, us);
    }
  }

  static void add_on_both_ends(std::vector<double>& of, int from, int to, double us) {
    of[from] += us;
    of[to] += us;
  }

  const Graph& graph_;
  const Plan& plan_;
  const std::vector<Edge>& edges_;
  StageCosts costs_;
};

}  // namespace

StageCosts predicted_costs(const Graph& graph, const Plan& plan, const std::vector<Edge>& edges,
                           const partitioner::Prediction& prediction) {
  return CostPredictor(graph, plan, edges).run(prediction);
}

}  // namespace smp::pipeline
