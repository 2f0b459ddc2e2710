// SPDX-License-Identifier: Apache-2.0
#include "tools/plan_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "core/table.h"
#include "partitioner/best_order.h"
#include "partitioner/cost.h"
#include "partitioner/cuts.h"
#include "partitioner/data_flow.h"
#include "partitioner/format.h"
#include "partitioner/modules.h"
#include "partitioner/order.h"
#include "partitioner/predict.h"
#include "partitioner/report.h"

namespace smp::tools {
namespace {

using core::Table;
using graph::Graph;
using nlohmann::ordered_json;
using partitioner::format_bytes;
using partitioner::format_time;

Table table_of(const std::vector<const char*>& headings) {
  Table table;
  for (const char* heading : headings) table.column(heading, Table::Align::kRight);
  return table;
}

/// Bytes of optimizer state for each byte trained, over all parameters.
double mean_state_factor(const Graph& graph, const partitioner::StepModel& step) {
  double trained = 0, state = 0;
  for (const graph::Value& value : graph.values) {
    if (value.kind != graph::ValueKind::kParameter || !value.meta.requires_grad) continue;
    const auto bytes = static_cast<double>(value.meta.nbytes());
    trained += bytes;
    state += bytes * partitioner::state_factor(step, value);
  }
  return trained > 0 ? state / trained : step.optimizer_state();
}

std::string stages_table(const Graph& graph, const Forecast& forecast) {
  Table table = table_of({"stage", "partition", "forward*", "backward*", "in flight", "weights",
                          "gradients", "optimizer", "copies", "activations", "memory"});
  for (int s = 0; s < forecast.plan.stages(); ++s) {
    const auto& stage = forecast.prediction.stages[s];
    table.row({fmt::format("{}", s), fmt::format("{}", forecast.plan.rank_of_stage[s]),
               format_time(forecast.options.costs().forward[s]),
               format_time(forecast.options.costs().backward[s]),
               fmt::format("{}", stage.in_flight), format_bytes(stage.weights),
               format_bytes(stage.gradients), format_bytes(stage.optimizer),
               format_bytes(stage.replicas + stage.casts), format_bytes(stage.activations),
               format_bytes(stage.memory())});
  }
  return "Time and memory\n\n" + table.to_string() +
         fmt::format(
             "  * per microbatch, with the stage's ends of transfers; optimizer state of "
             "{:g} bytes for each byte trained\n\n",
             mean_state_factor(graph, forecast.model));
}

std::string edges_table(const Graph& graph, const Forecast& forecast) {
  if (forecast.edges.empty()) return "";
  Table table = table_of({"from", "to", "tensors", "forward*", "backward*"});
  table.column("", Table::Align::kLeft);
  for (const auto& edge : forecast.edges) {
    const EdgeBytes bytes(graph, edge);
    table.row({fmt::format("{}", edge.from), fmt::format("{}", edge.to),
               fmt::format("{}", edge.values.size()), format_bytes(bytes.forward),
               format_bytes(bytes.backward), edge.to > edge.from + 1 ? "skip" : ""});
  }
  return "Edges between stages\n\n" + table.to_string() + "  * per microbatch\n\n";
}

/// "operator 12 (aten::addmm) in blocks.3.fc1".
std::string describe(const Graph& graph, int index) {
  const std::string& scope = graph.operators[index].scope;
  return partitioner::describe_operator(graph, index) + (scope.empty() ? "" : " in " + scope);
}

/// The last operator of each stage but the last.
std::vector<int> chosen_cuts(const partitioner::Plan& plan) {
  std::vector<int> cuts;
  for (int i = 0; i + 1 < static_cast<int>(plan.stage_of_operator.size()); ++i) {
    if (plan.stage_of_operator[i] != plan.stage_of_operator[i + 1]) cuts.push_back(i);
  }
  return cuts;
}

std::string cuts_text(const Graph& graph, const partitioner::Plan& plan) {
  const std::vector<core::Refusal> why = partitioner::why_illegal(graph);
  const auto legal = std::count(why.begin(), why.end(), std::nullopt);
  std::string text = fmt::format("Cuts: {} of {} are legal\n\n", legal, why.size());
  for (const int cut : chosen_cuts(plan)) {
    text += fmt::format("  {}|{}  after {}, before {}\n", plan.stage_of_operator[cut],
                        plan.stage_of_operator[cut + 1], describe(graph, cut),
                        describe(graph, cut + 1));
  }
  const auto first = std::find_if(why.begin(), why.end(),
                                  [](const core::Refusal& refusal) { return refusal.has_value(); });
  if (first != why.end()) {
    text += fmt::format("  the first illegal one is after {}: {}\n",
                        describe(graph, static_cast<int>(first - why.begin())), **first);
  }
  return text + "\n";
}

std::string schedule_name(const Graph& graph, const Forecast& forecast) {
  return graph.trains() ? forecast.name : "forward only";
}

std::string step_text(const Graph& graph, const Forecast& forecast) {
  const auto& simulation = forecast.simulation;
  Table table = table_of({"partition", "busy", "idle", "share idle", "memory"});
  for (int r = 0; r < forecast.ranks(); ++r) {
    table.row(
        {fmt::format("{}", r), format_time(simulation.busy[r]), format_time(simulation.idle[r]),
         fmt::format("{:.1f}%", 100 * simulation.idle[r] / std::max(simulation.makespan, 1e-9)),
         format_bytes(forecast.prediction.rank_memory[r])});
  }
  return fmt::format(
             "Predicted step: {} ({}, {} microbatch{}), {:.1f}% of the partitions' time idle"
             "\n\n",
             format_time(forecast.step_us()), schedule_name(graph, forecast),
             forecast.model.microbatches(), forecast.model.microbatches() == 1 ? "" : "es",
             100 * simulation.bubble()) +
         table.to_string();
}

/// The slowest rank's time in relation to the mean.
double balance(const Forecast& forecast) {
  const auto& times = forecast.prediction.rank_us;
  const double sum = std::accumulate(times.begin(), times.end(), 0.0);
  if (sum <= 0) return 1;
  return *std::max_element(times.begin(), times.end()) * static_cast<double>(times.size()) / sum;
}

int64_t traffic(const Graph& graph, const Forecast& forecast) {
  int64_t bytes = 0;
  for (const auto& edge : forecast.edges) {
    const EdgeBytes of_edge(graph, edge);
    bytes += of_edge.forward + of_edge.backward;
  }
  return bytes * forecast.model.microbatches();
}

int64_t largest_memory(const Forecast& forecast) {
  const auto& memory = forecast.prediction.rank_memory;
  return *std::max_element(memory.begin(), memory.end());
}

ordered_json stages_json(const Graph& graph, const Forecast& forecast) {
  ordered_json result = ordered_json::array();
  const std::vector<std::string> modules = partitioner::stage_modules(graph, forecast.plan);
  for (int s = 0; s < forecast.plan.stages(); ++s) {
    const auto& stage = forecast.prediction.stages[s];
    const auto& stages = forecast.plan.stage_of_operator;
    const auto [begin, end] = std::equal_range(stages.begin(), stages.end(), s);
    result.push_back({{"stage", s},
                      {"partition", forecast.plan.rank_of_stage[s]},
                      {"modules", modules[s]},
                      {"first_operator", begin - stages.begin()},
                      {"operators", end - begin},
                      {"forward_us", forecast.options.costs().forward[s]},
                      {"backward_us", forecast.options.costs().backward[s]},
                      {"transfer_us", stage.transfer_us()},
                      {"in_flight", stage.in_flight},
                      {"memory",
                       {{"weights", stage.weights},
                        {"gradients", stage.gradients},
                        {"optimizer", stage.optimizer},
                        {"copies", stage.replicas},
                        {"casts", stage.casts},
                        {"activations", stage.activations},
                        {"total", stage.memory()}}}});
  }
  return result;
}

ordered_json partitions_json(const Forecast& forecast) {
  ordered_json result = ordered_json::array();
  for (int r = 0; r < forecast.ranks(); ++r) {
    result.push_back({{"partition", r},
                      {"busy_us", forecast.simulation.busy[r]},
                      {"idle_us", forecast.simulation.idle[r]},
                      {"memory", forecast.prediction.rank_memory[r]}});
  }
  return result;
}

ordered_json edges_json(const Graph& graph, const Forecast& forecast) {
  ordered_json result = ordered_json::array();
  for (const auto& edge : forecast.edges) {
    const EdgeBytes bytes(graph, edge);
    result.push_back({{"from", edge.from},
                      {"to", edge.to},
                      {"tensors", edge.values.size()},
                      {"forward_bytes", bytes.forward},
                      {"backward_bytes", bytes.backward}});
  }
  return result;
}

ordered_json cuts_json(const Graph& graph, const partitioner::Plan& plan) {
  ordered_json illegal = ordered_json::array();
  const std::vector<core::Refusal> why = partitioner::why_illegal(graph);
  for (size_t i = 0; i < why.size(); ++i) {
    if (why[i]) illegal.push_back({{"after_operator", i}, {"reason", *why[i]}});
  }
  return {{"chosen", chosen_cuts(plan)}, {"illegal", std::move(illegal)}};
}

ordered_json shared_json(const Graph& graph, const partitioner::Plan& plan) {
  ordered_json result = ordered_json::array();
  for (const auto& replica : plan.replicas) {
    result.push_back({{"name", graph.values[replica.value].name},
                      {"bytes", graph.values[replica.value].meta.nbytes()},
                      {"owner", replica.owner},
                      {"stage", replica.stage},
                      {"gradient", replica.needs_gradient}});
  }
  return result;
}

}  // namespace

std::string to_text(const Graph& graph, const Forecast& forecast) {
  return partitioner::report(graph, forecast.plan, forecast.model) + "\n" +
         stages_table(graph, forecast) + edges_table(graph, forecast) +
         cuts_text(graph, forecast.plan) + step_text(graph, forecast);
}

ordered_json to_json(const Graph& graph, const Forecast& forecast) {
  return {{"partitions", forecast.ranks()},
          {"microbatches", forecast.model.microbatches()},
          {"schedule", schedule_name(graph, forecast)},
          {"active_microbatches", forecast.model.active_microbatches()},
          {"operators", graph.operators.size()},
          {"step_us", forecast.step_us()},
          {"idle_share", forecast.simulation.bubble()},
          {"balance", balance(forecast)},
          {"traffic_bytes", traffic(graph, forecast)},
          {"per_partition", partitions_json(forecast)},
          {"stages", stages_json(graph, forecast)},
          {"edges", edges_json(graph, forecast)},
          {"shared", shared_json(graph, forecast.plan)},
          {"order", forecast.plan.order},
          {"cuts", cuts_json(graph, forecast.plan)}};
}

std::vector<Alternative> plan_alternatives(const graph::SavedGraph& saved, const Config& config,
                                           const std::vector<int>& partitions, int replicas) {
  const Graph& graph = saved.graph;
  const std::string file = runtime::read_schedule(config);
  std::vector<Alternative> result;
  for (const int count : partitions) {
    auto options = runtime::partition_options(
        config, count,
        step_model(config, saved, count, static_cast<int>(config.microbatches()), replicas));
    if (config.pipeline() == "interleaved" && !config.is_set("active_microbatches")) {
      options.step().active_microbatches(count + 2);
    }
    Alternative alternative;
    alternative.partitions = count;
    try {
      options.placement(runtime::best_placement(config, file, graph, options));
      auto plan = partitioner::partition_in_best_order(graph, options);
      const Graph ordered = partitioner::reordered(graph, plan.order);
      alternative.forecast =
          forecast(config, file, ordered, std::move(plan), count, options.step());
    } catch (const PartitionError& error) {
      alternative.problem = error.what_without_backtrace();
    }
    result.push_back(std::move(alternative));
  }
  return result;
}

std::string to_text(const Graph& graph, const std::vector<Alternative>& alternatives) {
  Table table = table_of(
      {"partitions", "step", "speedup*", "idle", "max/mean", "memory**", "traffic per step"});
  std::string problems;
  double one = 0;
  for (const auto& op : graph.operators) one += partitioner::operator_time_us(graph, op);
  for (const Alternative& alternative : alternatives) {
    const std::string count = fmt::format("{}", alternative.partitions);
    if (!alternative.forecast) {
      table.row({count, "-", "-", "-", "-", "-", "-"});
      problems += fmt::format("  {} partitions: {}\n", count, alternative.problem);
      continue;
    }
    const Forecast& forecast = *alternative.forecast;
    const double speedup = one * forecast.model.microbatches() / std::max(forecast.step_us(), 1e-9);
    table.row({count, format_time(forecast.step_us()), fmt::format("{:.2f}", speedup),
               fmt::format("{:.1f}%", 100 * forecast.simulation.bubble()),
               fmt::format("{:.2f}", balance(forecast)), format_bytes(largest_memory(forecast)),
               format_bytes(traffic(graph, forecast))});
  }
  return table.to_string() +
         "  * over one process without transfers\n  ** of the partition that needs most\n" +
         problems;
}

ordered_json to_json(const Graph& graph, const std::vector<Alternative>& alternatives) {
  ordered_json result = ordered_json::array();
  for (const Alternative& alternative : alternatives) {
    if (alternative.forecast) {
      const Graph ordered = partitioner::reordered(graph, alternative.forecast->plan.order);
      result.push_back(to_json(ordered, *alternative.forecast));
    } else {
      result.push_back({{"partitions", alternative.partitions}, {"problem", alternative.problem}});
    }
  }
  return result;
}

}  // namespace smp::tools
