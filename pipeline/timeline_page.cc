// SPDX-License-Identifier: Apache-2.0
#include "pipeline/timeline_page.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "core/text.h"
#include "core/web_page.h"
#include "pipeline/trace.h"

namespace smp::pipeline {
namespace {

using nlohmann::json;

json actions_of(const Lane& lane) {
  json actions = json::array();
  for (size_t i = 0; i < lane.actions.size(); ++i) {
    const TimedAction& timed = lane.actions[i];
    actions.push_back({{"name", to_string(timed.action)},
                       {"text", describe(timed.action)},
                       {"kind", group_of(timed.action)},
                       {"stage", timed.action.stage},
                       {"m", timed.action.microbatch},
                       {"start", timed.start},
                       {"end", timed.end},
                       {"bytes", lane.bytes.empty() ? 0 : lane.bytes[i]},
                       {"keeps", timed.memory}});
  }
  return actions;
}

json reductions_of(const Lane& lane) {
  json reductions = json::array();
  for (size_t i = 0; i < lane.reductions.size(); ++i) {
    const TimedReduction& timed = lane.reductions[i];
    reductions.push_back({{"text", describe_reduction(i, lane.reductions.size())},
                          {"start", timed.start},
                          {"end", timed.end},
                          {"bytes", timed.bytes}});
  }
  return reductions;
}

json to_json(const StepTimeline& step, const Timeline& timeline) {
  json lanes = json::array(), transfers = json::array();
  for (const Lane& lane : step.lanes) {
    lanes.push_back({{"replica", lane.replica},
                     {"rank", lane.rank},
                     {"idle", step.idle(lane)},
                     {"actions", actions_of(lane)},
                     {"reductions", reductions_of(lane)}});
  }
  for (const Delivery& delivery : deliveries_of(step)) {
    const Action& send = step.lanes[delivery.from_lane].actions[delivery.send].action;
    transfers.push_back({{"kind", send.is_backward() ? "grads" : "values"},
                         {"from", delivery.from_lane},
                         {"send", delivery.send},
                         {"to", delivery.to_lane},
                         {"receive", delivery.receive}});
  }
  return {{"name", step.name},
          {"headline", headline(step, timeline)},
          {"table", table_of(step, timeline)},
          {"makespan", step.makespan},
          {"lanes", lanes},
          {"transfers", transfers}};
}

}  // namespace

std::string page_data(const Timeline& timeline) {
  json data = {{"title", core::printable_lines(timeline.title)},
               {"unit", timeline.unit == TimeUnit::kSlots ? "slots" : "us"},
               {"measured", !timeline.measured.empty()},
               {"steps", json::array()},
               {"predicted", nullptr}};
  for (const StepTimeline& step : shown_steps(timeline)) {
    data["steps"].push_back(to_json(step, timeline));
  }
  if (timeline.predicted) data["predicted"] = to_json(*timeline.predicted, timeline);
  return data.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string to_html(const Timeline& timeline) {
  return core::web_page("timeline", timeline.title, page_data(timeline));
}

TimelineFiles timeline_files(const std::string& path) {
  std::string name = path;
  const std::string ending = std::filesystem::path(path).extension();
  if (ending == ".html" || ending == ".json") name.erase(name.size() - ending.size());
  return {name + ".html", name + ".json"};
}

TimelineFiles write_timeline(const Timeline& timeline, const std::string& path) {
  TimelineFiles files = timeline_files(path);
  constexpr const char* kFailure = "the timeline cannot be written";
  core::write_file(files.page, to_html(timeline), kFailure);
  core::write_file(files.trace, to_trace(timeline), kFailure);
  return files;
}

}  // namespace smp::pipeline
