// SPDX-License-Identifier: Apache-2.0
#include "tools/schedule_view.h"

#include <c10/util/StringUtil.h>

#include <filesystem>
#include <set>
#include <utility>
#include <vector>

#include "pipeline/generators.h"
#include "pipeline/schedule_file.h"
#include "pipeline/simulator.h"
#include "pipeline/timeline.h"
#include "pipeline/timeline_page.h"

namespace smp::tools {
namespace {

using pipeline::Action;
using pipeline::Schedule;
using pipeline::StageCosts;
using pipeline::StageEdge;

bool is_file(const std::string& schedule) {
  const std::string ending = std::filesystem::path(schedule).extension().string();
  return ending == ".csv" || ending == ".json" || ending == ".txt";
}

Schedule make(const std::string& name, const Config& config) {
  const auto& kind = pipeline::schedule_kind(name);
  auto options =
      kind.place(static_cast<int>(config.partitions()), static_cast<int>(config.virtual_stages()),
                 static_cast<int>(config.microbatches()));
  options.active_microbatches(static_cast<int>(config.active_microbatches()));
  return pipeline::lower(kind.generate(options), options.edges());
}

/// A file's edges are those over which it sends, or else a chain.
Schedule load(const std::string& path) {
  Schedule schedule = pipeline::load_schedule(path);
  if (!pipeline::is_compute_order(schedule)) return schedule;
  return pipeline::lower(schedule, pipeline::chain_edges(schedule.stages()));
}

/// The edges between ranks that the schedule sends over.
std::vector<StageEdge> edges_of(const Schedule& schedule) {
  std::set<std::pair<int, int>> forward, backward;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) {
      if (action.kind == Action::Kind::kSendForward) forward.insert({action.stage, action.peer});
      if (action.kind == Action::Kind::kSendBackward) backward.insert({action.peer, action.stage});
    }
  }
  // Stages of one rank hand over without sending.
  for (const StageEdge& edge : pipeline::chain_edges(schedule.stages())) {
    if (schedule.rank_of(edge.from) != schedule.rank_of(edge.to)) continue;
    forward.insert({edge.from, edge.to});
    backward.insert({edge.from, edge.to});
  }
  std::vector<StageEdge> edges;
  for (const auto& edge : forward) {
    edges.push_back({edge.first, edge.second, backward.count(edge) > 0});
  }
  return edges;
}

std::string title_of(const std::string& name, const Schedule& schedule) {
  const auto counted = [](int number, const char* what, const char* plural = "s") {
    return number == 1 ? c10::str(", 1 ", what) : c10::str(", ", number, " ", what, plural);
  };
  return name + counted(schedule.ranks(), "rank") +
         (schedule.stages() > schedule.ranks() ? counted(schedule.stages(), "stage") : "") +
         counted(schedule.microbatches(), "microbatch", "es");
}

}  // namespace

std::string show_schedule(const std::string& schedule, const Config& config,
                          const std::string& format) {
  const Schedule program = is_file(schedule) ? load(schedule) : make(schedule, config);
  if (format == "json") return pipeline::schedule_to_json(program) + "\n";
  StageCosts costs = StageCosts::uniform(program.stages());
  // So that memory counts microbatches of a whole rank.
  costs.kept.assign(program.stages(), static_cast<double>(program.ranks()) / program.stages());
  const auto simulation = pipeline::simulate(program, edges_of(program), costs);
  pipeline::Timeline timeline;
  timeline.title = title_of(
      is_file(schedule) ? std::filesystem::path(schedule).stem().string() : schedule, program);
  timeline.unit = pipeline::TimeUnit::kSlots;
  timeline.predicted = pipeline::predicted_timeline(simulation);
  if (format == "html") return pipeline::to_html(timeline);
  return timeline.title + "\n\n" + pipeline::draw(simulation) + "\n" +
         pipeline::to_string(timeline);
}

}  // namespace smp::tools
