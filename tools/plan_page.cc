// SPDX-License-Identifier: Apache-2.0
#include "tools/plan_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/text.h"
#include "core/web_page.h"
#include "partitioner/format.h"
#include "tools/plan_boxes.h"

namespace smp::tools {
namespace {

using graph::Graph;
using nlohmann::json;
using partitioner::format_bytes;
using partitioner::format_time;

std::string headline(const Graph& graph, const Forecast& forecast) {
  const int stages = forecast.plan.stages(), microbatches = forecast.model.microbatches();
  return fmt::format(
      "{} operators in {} stage{}, {} microbatch{}: a step of {} predicted, {:.1f}% of the "
      "partitions' time idle",
      graph.operators.size(), stages, stages == 1 ? "" : "s", microbatches,
      microbatches == 1 ? "" : "es", format_time(forecast.step_us()),
      100 * forecast.simulation.bubble());
}

json stages_of(const Forecast& forecast) {
  json stages = json::array();
  for (int s = 0; s < forecast.plan.stages(); ++s) {
    const auto& predicted = forecast.prediction.stages[s];
    stages.push_back({{"rank", forecast.plan.rank_of_stage[s]},
                      {"time_us", predicted.time_us()},
                      {"memory", predicted.memory()}});
  }
  return stages;
}

/// Text that the browser shows when the pointer rests on a box.
std::string tooltip(const Graph& graph, const Box& box) {
  constexpr int kShown = 24;
  std::string text = box.name;
  for (int i = box.first; i <= std::min(box.last, box.first + kShown - 1); ++i) {
    const auto& op = graph.operators[i];
    text += fmt::format("\n{} {} {}", i, op.name(), format_time(op.cost.forward_us));
  }
  if (box.operators() > kShown) text += fmt::format("\nand {} more", box.operators() - kShown);
  return text;
}

json to_json(const Graph& graph, const Box& box) {
  return {{"stage", box.stage},
          {"name", box.name},
          {"operators", box.operators()},
          {"share", box.share},
          {"text", tooltip(graph, box)}};
}

json to_json(const std::vector<BoxEdge>& edges) {
  json result = json::array();
  for (const BoxEdge& edge : edges) {
    result.push_back({{"from", edge.from},
                      {"to", edge.to},
                      {"tensors", edge.tensors},
                      {"bytes", edge.bytes},
                      {"gradient_bytes", edge.gradient_bytes}});
  }
  return result;
}

/// Parameters that several stages read: from the owner to each of the others.
json ties_of(const Graph& graph, const partitioner::Plan& plan, const Boxes& boxes) {
  json ties = json::array();
  for (const auto& replica : plan.replicas) {
    const auto from = boxes.touching(graph, replica.value, replica.owner);
    const auto to = boxes.touching(graph, replica.value, replica.stage);
    if (from.empty() || to.empty()) continue;
    const graph::Value& value = graph.values[replica.value];
    ties.push_back({{"from", from.front()},
                    {"to", to.front()},
                    {"label", value.name + " " + format_bytes(value.meta.nbytes())}});
  }
  return ties;
}

/// The computes of each rank.
json computes_of(const Forecast& forecast) {
  json ranks = json::array();
  for (const auto& timeline : forecast.simulation.timeline) {
    json computes = json::array();
    for (const auto& timed : timeline) {
      if (!timed.action.is_compute()) continue;
      computes.push_back({{"start", timed.start},
                          {"end", timed.end},
                          {"m", timed.action.microbatch},
                          {"back", timed.action.is_backward()}});
    }
    ranks.push_back(computes);
  }
  return ranks;
}

}  // namespace

std::string page_data(const Graph& graph, const Forecast& forecast, const std::string& title) {
  const Boxes boxes = make_boxes(graph, forecast.plan);
  json data = {{"title", core::printable_lines(title)},
               {"headline", headline(graph, forecast)},
               {"trains", graph.trains()},
               {"step_us", forecast.step_us()},
               {"stages", stages_of(forecast)},
               {"boxes", json::array()},
               {"inside", to_json(boxes.inside)},
               {"between", to_json(boxes.between)},
               {"ties", ties_of(graph, forecast.plan, boxes)},
               {"timeline", computes_of(forecast)}};
  for (const Box& box : boxes.boxes) data["boxes"].push_back(to_json(graph, box));
  return data.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string to_html(const Graph& graph, const Forecast& forecast, const std::string& title) {
  return core::web_page("plan", title, page_data(graph, forecast, title));
}

}  // namespace smp::tools
