// SPDX-License-Identifier: Apache-2.0
#include "partitioner/predict.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "partitioner/cost.h"
#include "partitioner/format.h"
#include "partitioner/weight_casts.h"

namespace smp::partitioner {

using graph::Graph;
using graph::Value;
using graph::ValueId;
using graph::ValueKind;

namespace {

bool is_trained(const Graph& graph, const Value& value) {
  return graph.trains() && value.meta.requires_grad;
}

int64_t part_of(int64_t bytes, int replicas) { return (bytes + replicas - 1) / replicas; }

void add_operators(const Graph& graph, const Plan& plan, std::vector<StagePrediction>& stages) {
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    StagePrediction& stage = stages[plan.stage_of_operator[i]];
    const graph::Cost& cost = graph.operators[i].cost;
    stage.forward_us += cost.forward_us;
    if (graph.trains()) stage.backward_us += cost.backward_us;
    stage.activations += stage.in_flight * cost.saved_bytes;
  }
  for (const Recomputed& again : plan.recomputed) {
    stages[again.stage].forward_us += graph.operators[again.operator_index].cost.forward_us;
  }
}

void add_parameters(const Graph& graph, const Plan& plan, const StepModel& step,
                    std::vector<StagePrediction>& stages) {
  for (const Value& value : graph.values) {
    const auto owner = plan.owner.find(value.name);
    if (value.kind != ValueKind::kParameter || owner == plan.owner.end()) continue;
    const ParameterMemory memory(graph, value, step);
    StagePrediction& stage = stages[owner->second];
    stage.weights += memory.weights;
    stage.gradients += memory.gradients;
    stage.optimizer += memory.optimizer;
  }
  std::set<std::pair<ValueId, int>> copies;  // stages of one rank share one
  for (const Replica& replica : plan.replicas) {
    const int rank = plan.rank_of_stage[replica.stage];
    if (rank == plan.rank_of_stage[replica.owner]) continue;
    if (!copies.insert({replica.value, rank}).second) continue;
    stages[replica.stage].replicas += replica_bytes(graph, graph.values[replica.value]);
  }
}

void add_casts(const Graph& graph, const Plan& plan, std::vector<StagePrediction>& stages) {
  for (const WeightCast& cast : weight_casts(graph)) {
    std::set<int> readers;
    for (int index : cast.operators) readers.insert(plan.stage_of_operator[index]);
    for (int stage : readers) stages[stage].casts += cast.bytes;
  }
}

/// Values that cross to another rank, their gradients, and those of replicas.
void add_messages(const Graph& graph, const Plan& plan, const StepModel& step,
                  std::vector<StagePrediction>& stages) {
  const auto add = [&](int from, int to, graph::ValueId value) {
    if (plan.rank_of_stage[from] == plan.rank_of_stage[to]) return;
    stages[from].messages += message_bytes(step, graph.values[value].meta.nbytes());
  };
  for (const Transfer& hop : plan.transfers) {
    add(hop.from, hop.to, hop.value);
    if (hop.needs_gradient) add(hop.to, hop.from, hop.value);
  }
  for (const Replica& replica : plan.replicas) {
    if (replica.needs_gradient) add(replica.stage, replica.gradient_to, replica.value);
  }
}

void add_transfers(const Graph& graph, const Plan& plan, const CostModel& costs,
                   std::vector<StagePrediction>& stages) {
  const auto link = [&](int from, int to) {
    return costs.between(plan.rank_of_stage[from], plan.rank_of_stage[to]);
  };
  const auto add = [&](int from, int to, double us, bool comes_back) {
    for (int stage : {from, to}) {
      stages[stage].values_us += us;
      if (comes_back) stages[stage].gradients_us += us;
    }
  };
  std::set<std::pair<int, int>> edges;
  for (const Transfer& hop : plan.transfers) {
    if (plan.rank_of_stage[hop.from] == plan.rank_of_stage[hop.to]) continue;
    const int64_t bytes = graph.values[hop.value].meta.nbytes();
    const double us = transfer_us(link(hop.from, hop.to), bytes, /*needs_gradient=*/false);
    add(hop.from, hop.to, us, hop.needs_gradient);
    stages[hop.to].activations += stages[hop.to].in_flight * bytes;
    edges.insert({hop.from, hop.to});
  }
  for (const auto& [from, to] : edges) {
    add(from, to, message_us(link(from, to), /*trains=*/false), graph.trains());
  }
}

/// Bytes of the two buckets of gradients that a rank has on their way, with one microbatch.
std::vector<int64_t> bucket_bytes(const Graph& graph, const Plan& plan,
                                  const ReplicaSharding& sharding, size_t ranks) {
  std::vector<int64_t> bytes(ranks, 0), elements(ranks, 0), largest(ranks, 0);
  for (const Value& value : graph.values) {
    const auto owner = plan.owner.find(value.name);
    if (owner == plan.owner.end() || !is_trained(graph, value) || !sharding.divides(value))
      continue;
    const int rank = plan.rank_of_stage[owner->second];
    bytes[rank] += gradient_bytes(value);
    elements[rank] += value.meta.numel();
    largest[rank] = std::max(largest[rank], gradient_bytes(value));
  }
  for (size_t r = 0; r < ranks; ++r) {
    if (elements[r] <= sharding.bucket()) continue;
    // A larger parameter has a bucket for itself.
    const int64_t bucket = std::max(largest[r], bytes[r] / elements[r] * sharding.bucket());
    bytes[r] = std::min(bytes[r], 2 * bucket);
  }
  return bytes;
}

/// The units of the plan, and what they and the sums of gradients need.
void add_divided(const Graph& graph, const Plan& plan, const StepModel& step, Prediction& result) {
  const ReplicaSharding& sharding = step.sharding();
  const size_t ranks = result.rank_memory.size();
  result.gathered.assign(ranks, 0);
  result.buckets.assign(ranks, 0);
  if (sharding.parameters() == 1) return;
  result.units = find_units(graph, plan, step.regions(), sharding);
  result.gathered = gathered_bytes(graph, plan, result.units, sharding);
  if (step.microbatches() == 1) result.buckets = bucket_bytes(graph, plan, sharding, ranks);
  for (size_t r = 0; r < ranks; ++r) {
    result.rank_memory[r] += result.gathered[r] + result.buckets[r];
  }
}

}  // namespace

StepModel StepModel::in_order(const std::vector<int>& order) const {
  StepModel result = *this;
  for (size_t i = 0; i < order.size() && !regions_.empty(); ++i) {
    result.regions_[i] = regions_[order[i]];
  }
  return result;
}

int64_t working_bytes(const Graph& graph, const StepModel& step) {
  Plan plan;
  plan.stage_of_operator.assign(graph.operators.size(), 0);
  for (const Value& value : graph.values) {
    if (value.kind == ValueKind::kParameter) plan.owner.emplace(value.name, 0);
  }
  Prediction result;
  result.rank_memory = {0};
  add_divided(graph, plan, step, result);
  return result.rank_memory.front();
}

double state_factor(const StepModel& step, const Value& parameter) {
  const auto found = step.optimizer_states().find(parameter.name);
  return found == step.optimizer_states().end() ? step.optimizer_state() : found->second;
}

int microbatches_in_flight(const StepModel& step, bool trains, int stage, int stages) {
  if (!trains) return 0;
  if (!step.interleaved()) return step.microbatches();
  const int most = std::min(step.microbatches(), step.active_microbatches());
  return step.splits() ? most : std::min(most, std::max(2 * (stages - stage) - 1, 1));
}

ParameterMemory::ParameterMemory(const Graph& graph, const Value& value, const StepModel& step)
    : weights(value.meta.nbytes()) {
  const ReplicaSharding& sharding = step.sharding();
  const bool is_divided = sharding.divides(value);
  if (is_divided) weights = part_of(weights, sharding.parameters());
  if (!is_trained(graph, value)) return;
  const int updating = is_divided ? sharding.parameters() : sharding.states();
  const bool is_alone = step.replicas() == 1 && sharding.states() == 1;
  const int of_divided =
      step.microbatches() > 1 ? step.shards() : 0;  // else buckets, see `bucket_bytes`
  const int sums = is_divided ? of_divided
                   : is_alone ? std::min(step.shards() - 1, 1)
                              : step.shards();
  gradients = sums * gradient_bytes(value) + part_of(gradient_bytes(value), updating);
  const int64_t trained = is_divided ? weights : part_of(weights, updating);
  optimizer = static_cast<int64_t>(static_cast<double>(trained) * state_factor(step, value));
}

int64_t replica_bytes(const Graph& graph, const Value& value) {
  return value.meta.nbytes() * (is_trained(graph, value) ? 2 : 1);
}

int64_t message_bytes(const StepModel& step, int64_t bytes) {
  return std::min(step.messages(), step.microbatches()) * bytes;
}

double transfer_us(const Link& link, int64_t bytes, bool needs_gradient) {
  return link.of_tensor(bytes) * (needs_gradient ? 2 : 1) / 2;  // half at each end
}

double message_us(const Link& link, bool trains) { return link.message_us * (trains ? 2 : 1) / 2; }

Prediction predict(const Graph& graph, const Plan& plan, const StepModel& step) {
  Prediction result;
  result.stages.resize(plan.stages());
  for (int s = 0; s < plan.stages(); ++s) {
    result.stages[s].in_flight = microbatches_in_flight(step, graph.trains(), s, plan.stages());
  }
  add_operators(graph, plan, result.stages);
  add_parameters(graph, plan, step, result.stages);
  add_casts(graph, plan, result.stages);
  add_transfers(graph, plan, step.costs(), result.stages);
  add_messages(graph, plan, step, result.stages);
  const int ranks = *std::max_element(plan.rank_of_stage.begin(), plan.rank_of_stage.end()) + 1;
  result.rank_us.assign(ranks, 0);
  result.recomputed = graph.trains() ? step.largest_region() : 0;
  result.rank_memory.assign(ranks, result.recomputed);
  add_divided(graph, plan, step, result);
  for (int s = 0; s < plan.stages(); ++s) {
    result.rank_us[plan.rank_of_stage[s]] += result.stages[s].time_us();
    result.rank_memory[plan.rank_of_stage[s]] += result.stages[s].memory();
  }
  result.step_us =
      std::accumulate(result.rank_us.begin(), result.rank_us.end(), 0.0) +
      (step.microbatches() - 1) * *std::max_element(result.rank_us.begin(), result.rank_us.end());
  return result;
}

std::string describe_memory(const Plan& plan, const Prediction& prediction, int rank) {
  StagePrediction sum;
  for (int s = 0; s < plan.stages(); ++s) {
    if (plan.rank_of_stage[s] != rank) continue;
    const StagePrediction& stage = prediction.stages[s];
    sum.weights += stage.weights + stage.replicas;
    sum.gradients += stage.gradients;
    sum.optimizer += stage.optimizer;
    sum.casts += stage.casts;
    sum.messages += stage.messages;
    sum.activations += stage.activations;
    sum.in_flight = std::max(sum.in_flight, stage.in_flight);
  }
  std::string text = fmt::format(
      "{}: weights {}, gradients {}, optimizer state {}, activations of {} "
      "microbatch{} {}",
      format_bytes(prediction.rank_memory[rank]), format_bytes(sum.weights),
      format_bytes(sum.gradients + prediction.buckets[rank]), format_bytes(sum.optimizer),
      sum.in_flight, sum.in_flight == 1 ? "" : "es", format_bytes(sum.activations));
  const auto add = [&](const char* use, int64_t bytes) {
    if (bytes > 0) text += fmt::format(", {} {}", use, format_bytes(bytes));
  };
  add("casts of weights", sum.casts);
  add("messages under way", sum.messages);
  add("a region that runs again", prediction.recomputed);
  add("divided parameters while they are whole", prediction.gathered[rank]);
  return text;
}

}  // namespace smp::partitioner
