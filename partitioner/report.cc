// SPDX-License-Identifier: Apache-2.0
#include "partitioner/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/table.h"
#include "partitioner/cost.h"
#include "partitioner/format.h"
#include "partitioner/modules.h"
#include "partitioner/order.h"

namespace smp::partitioner {
namespace {

using core::Table;
using graph::Graph;
using graph::Value;
using graph::ValueKind;

constexpr size_t kMaxModulesWidth = 48;

/// One stage in numbers; bytes of activations are per microbatch.
struct StageSummary {
  int operators = 0;
  int64_t parameters = 0;
  int64_t weight_bytes = 0;
  int64_t gradient_bytes = 0;
  int64_t saved_bytes = 0;
  double time_us = 0;
  std::map<int, std::pair<int, int64_t>> sends;  ///< receiver -> tensors, bytes
};

std::vector<StageSummary> summarize(const Graph& graph, const Plan& plan) {
  std::vector<StageSummary> stages(plan.stages());
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    StageSummary& stage = stages[plan.stage_of_operator[i]];
    ++stage.operators;
    stage.saved_bytes += graph.operators[i].cost.saved_bytes;
    stage.time_us += operator_time_us(graph, graph.operators[i]);
  }
  for (const Value& value : graph.values) {
    const auto owner = plan.owner.find(value.name);
    if (value.kind != ValueKind::kParameter || owner == plan.owner.end()) continue;
    StageSummary& stage = stages[owner->second];
    stage.parameters += value.meta.numel();
    stage.weight_bytes += value.meta.nbytes();
    if (graph.trains() && value.meta.requires_grad) stage.gradient_bytes += value.meta.nbytes();
  }
  for (const Transfer& transfer : plan.transfers) {
    auto& [tensors, bytes] = stages[transfer.from].sends[transfer.to];
    ++tensors;
    bytes += graph.values[transfer.value].meta.nbytes();
  }
  return stages;
}

std::string shorten(const std::string& modules) {
  if (modules.size() <= kMaxModulesWidth) return modules;
  size_t end = modules.rfind(", ", kMaxModulesWidth - 5);
  if (end == std::string::npos) end = kMaxModulesWidth - 5;
  return modules.substr(0, end) + ", ...";
}

/// "1 stage", "2 stages".
std::string counted(size_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string format_sends(const StageSummary& stage) {
  std::string text;
  for (const auto& [receiver, what] : stage.sends) {
    if (!text.empty()) text += ", ";
    text += fmt::format("{} to {} ({})", format_bytes(what.second), receiver,
                        counted(what.first, "tensor"));
  }
  return text.empty() ? "-" : text;
}

std::string header(const Graph& graph, const Plan& plan, const std::vector<StageSummary>& stages,
                   int microbatches) {
  int64_t parameters = 0;
  for (const StageSummary& stage : stages) parameters += stage.parameters;
  return fmt::format(
      "Partition assignments: {}, {}, {} parameters, {}\n\n", counted(plan.stages(), "stage"),
      counted(graph.operators.size(), "operator"),
      parameters == 0 ? "no" : format_count(parameters),
      microbatches == 1 ? "1 microbatch" : fmt::format("{} microbatches", microbatches));
}

std::string table(const Graph& graph, const Plan& plan, const std::vector<StageSummary>& stages) {
  Table table;
  table.column("stage", Table::Align::kRight);
  table.column("modules", Table::Align::kLeft);
  table.column("operators", Table::Align::kRight);
  table.column("parameters", Table::Align::kRight);
  table.column("weights", Table::Align::kRight);
  table.column("gradients", Table::Align::kRight);
  table.column("saved*", Table::Align::kRight);
  table.column("time", Table::Align::kRight);
  table.column("sends*", Table::Align::kLeft);
  const std::vector<std::string> modules = stage_modules(graph, plan);
  double total_time = 0;
  for (const StageSummary& stage : stages) total_time += stage.time_us;
  for (size_t s = 0; s < stages.size(); ++s) {
    const StageSummary& stage = stages[s];
    table.row({fmt::format("{}", s), shorten(modules[s]), fmt::format("{}", stage.operators),
               format_count(stage.parameters), format_bytes(stage.weight_bytes),
               format_bytes(stage.gradient_bytes), format_bytes(stage.saved_bytes),
               total_time > 0 ? fmt::format("{:.1f}%", 100 * stage.time_us / total_time) : "-",
               format_sends(stage)});
  }
  return table.to_string() + "  * per microbatch\n\n";
}

std::string balance(const std::vector<StageSummary>& stages) {
  const auto less = [](const StageSummary& a, const StageSummary& b) {
    return a.time_us < b.time_us;
  };
  const auto slowest = std::max_element(stages.begin(), stages.end(), less);
  double total = 0;
  for (const StageSummary& stage : stages) total += stage.time_us;
  if (total <= 0) return "  balance   no times were measured\n";
  const double mean = total / static_cast<double>(stages.size());
  return fmt::format(
      "  balance   max/mean {:.2f}: stage {} takes {:.3g} ms per microbatch, the mean "
      "is {:.3g} ms\n",
      slowest->time_us / mean, slowest - stages.begin(), slowest->time_us / 1000, mean / 1000);
}

std::string traffic(const Graph& graph, const Plan& plan, int microbatches) {
  int64_t forward = 0, backward = 0;
  for (const Transfer& transfer : plan.transfers) {
    const int64_t bytes = graph.values[transfer.value].meta.nbytes();
    forward += bytes;
    if (transfer.needs_gradient) backward += bytes;
  }
  if (forward == 0) return "";
  return fmt::format("  traffic   {} forward and {} backward between stages per step\n",
                     format_bytes(forward * microbatches), format_bytes(backward * microbatches));
}

/// A line for each tensor with replicas.
std::string sharing(const Graph& graph, const Plan& plan) {
  std::map<graph::ValueId, std::vector<const Replica*>> replicas;
  for (const Replica& replica : plan.replicas) replicas[replica.value].push_back(&replica);
  std::string text;
  for (const auto& [id, of_value] : replicas) {
    std::vector<int> stages;
    bool gradient = false;
    for (const Replica* replica : of_value) {
      stages.push_back(replica->stage);
      gradient |= replica->needs_gradient;
    }
    const Value& value = graph.values[id];
    text += fmt::format("  {:<8}  {} ({}) belongs to stage {}, read by {} {}{}\n",
                        value.kind == ValueKind::kParameter ? "tied" : "shared", value.name,
                        format_bytes(value.meta.nbytes()), of_value.front()->owner,
                        stages.size() == 1 ? "stage" : "stages", fmt::join(stages, ", "),
                        gradient ? ", gradient back per microbatch" : "");
  }
  return text;
}

std::string predicted_step(const Prediction& predicted, int microbatches) {
  if (predicted.step_us <= 0) return "";
  const double slowest = *std::max_element(predicted.rank_us.begin(), predicted.rank_us.end());
  const double first = predicted.step_us - (microbatches - 1) * slowest;
  std::string text =
      fmt::format("  step      {} predicted: {} for one microbatch through all stages",
                  format_time(predicted.step_us), format_time(first));
  if (microbatches > 1) {
    text += fmt::format(", then {} for each of {} more", format_time(slowest), microbatches - 1);
  }
  return text + "\n";
}

/// The rank that needs most memory.
std::string predicted_memory(const Plan& plan, const Prediction& predicted) {
  const auto most = std::max_element(predicted.rank_memory.begin(), predicted.rank_memory.end());
  if (*most == 0) return "";
  const auto rank = static_cast<int>(most - predicted.rank_memory.begin());
  return fmt::format("  memory    partition {} needs most, {}\n", rank,
                     describe_memory(plan, predicted, rank));
}

std::string order(const Plan& plan) {
  const int moved = moved_operators(plan.order);
  if (moved == 0) return "";
  return fmt::format("  order     {} of {} operators run in another place than in the program\n",
                     moved, plan.order.size());
}

std::string prediction(const Graph& graph, const Plan& plan, const StepModel& step) {
  const Prediction predicted = predict(graph, plan, step);
  return predicted_step(predicted, step.microbatches()) + predicted_memory(plan, predicted);
}

}  // namespace

std::string report(const Graph& graph, const Plan& plan, const StepModel& step) {
  const std::vector<StageSummary> stages = summarize(graph, plan);
  return header(graph, plan, stages, step.microbatches()) + table(graph, plan, stages) +
         balance(stages) + traffic(graph, plan, step.microbatches()) + order(plan) +
         sharing(graph, plan) + prediction(graph, plan, step);
}

}  // namespace smp::partitioner
