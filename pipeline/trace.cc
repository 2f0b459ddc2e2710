// SPDX-License-Identifier: Apache-2.0
#include "pipeline/trace.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

namespace smp::pipeline {
namespace {

using nlohmann::json;

/// An arrow ends in the receive, of which the last moment is no longer part.
constexpr double kNanosecond = 1e-3;

/// The thread of a rank's reductions is its rank and this.
constexpr int kReductions = 1 << 20;

class Trace {
 public:
  explicit Trace(const Timeline& timeline) {
    int replicas = 0;
    for (const StepTimeline& step : timeline.measured) {
      for (const Lane& lane : step.lanes) {
        replicas = std::max(replicas, lane.replica + 1);
        name_lane(lane, lane.replica, "replica " + std::to_string(lane.replica));
      }
      add(step, 0);
    }
    if (!timeline.predicted) return;
    for (const Lane& lane : timeline.predicted->lanes) name_lane(lane, replicas, "predicted");
    add(*timeline.predicted, replicas);
  }

  std::string finish() const {
    return "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n" + events_ + "\n]}\n";
  }

 private:
  /// The processes of the step's replicas are numbered from `process`.
  void add(const StepTimeline& step, int process) {
    for (const Lane& lane : step.lanes) {
      for (size_t i = 0; i < lane.actions.size(); ++i) add(step, lane, i, process);
      for (size_t i = 0; i < lane.reductions.size(); ++i) add_reduction(step, lane, i, process);
      add_memory(step, lane, process);
    }
    for (const Delivery& delivery : deliveries_of(step)) add(step, delivery, process);
  }

  void name_lane(const Lane& lane, int process, const std::string& process_name) {
    const std::string thread = "rank " + std::to_string(lane.rank);
    name({process, lane.rank}, process_name, thread, 2 * lane.rank);
    if (lane.reductions.empty()) return;
    name({process, lane.rank + kReductions}, process_name, thread + " reduces", 2 * lane.rank + 1);
  }

  void name(const std::pair<int, int>& thread, const std::string& process_name,
            const std::string& thread_name, int place) {
    if (!named_.insert(thread).second) return;
    const auto metadata = [&](const char* what, json arguments) {
      add({{"ph", "M"},
           {"pid", thread.first},
           {"tid", thread.second},
           {"name", what},
           {"args", arguments}});
    };
    metadata("process_name", {{"name", process_name}});
    metadata("process_sort_index", {{"sort_index", thread.first}});
    metadata("thread_name", {{"name", thread_name}});
    metadata("thread_sort_index", {{"sort_index", place}});
  }

  void add(const StepTimeline& step, const Lane& lane, size_t index, int process) {
    const TimedAction& timed = lane.actions[index];
    json arguments = {{"step", step.name}, {"stage", timed.action.stage}};
    if (timed.action.microbatch >= 0) arguments["microbatch"] = timed.action.microbatch;
    if (timed.action.is_transfer()) {
      arguments["peer"] = timed.action.peer;
      if (!lane.bytes.empty()) arguments["bytes"] = lane.bytes[index];
    }
    add({{"ph", "X"},
         {"pid", process + lane.replica},
         {"tid", lane.rank},
         {"name", to_string(timed.action)},
         {"cat", group_of(timed.action)},
         {"ts", step.begin + timed.start},
         {"dur", timed.end - timed.start},
         {"args", std::move(arguments)}});
  }

  void add_reduction(const StepTimeline& step, const Lane& lane, size_t index, int process) {
    const TimedReduction& timed = lane.reductions[index];
    add({{"ph", "X"},
         {"pid", process + lane.replica},
         {"tid", lane.rank + kReductions},
         {"name", describe_reduction(index, lane.reductions.size())},
         {"cat", "reduce"},
         {"ts", step.begin + timed.start},
         {"dur", timed.end - timed.start},
         {"args", {{"step", step.name}, {"bytes", timed.bytes}}}});
  }

  void add_memory(const StepTimeline& step, const Lane& lane, int process) {
    if (lane.peak_memory() <= 0) return;
    double before = -1;
    for (const TimedAction& timed : lane.actions) {
      if (timed.memory == before) continue;
      before = timed.memory;
      add({{"ph", "C"},
           {"pid", process + lane.replica},
           {"name", "kept by rank " + std::to_string(lane.rank)},
           {"ts", step.begin + timed.end},
           {"args", {{"bytes", timed.memory}}}});
    }
  }

  void add(const StepTimeline& step, const Delivery& delivery, int process) {
    const Lane& from = step.lanes[delivery.from_lane];
    const Lane& to = step.lanes[delivery.to_lane];
    const TimedAction& send = from.actions[delivery.send];
    const TimedAction& receive = to.actions[delivery.receive];
    ++arrows_;
    const auto end = [&](const char* phase, const Lane& lane, double time) {
      return json{{"ph", phase},
                  {"pid", process + lane.replica},
                  {"tid", lane.rank},
                  {"id", arrows_},
                  {"name", send.action.is_backward() ? "gradients" : "values"},
                  {"cat", "transfer"},
                  {"ts", step.begin + time}};
    };
    add(end("s", from, send.start));
    json last = end("f", to, std::max(receive.start, receive.end - kNanosecond));
    last["bp"] = "e";  // binds to the receive, not to the event after it
    add(last);
  }

  void add(const json& event) {
    events_ += events_.empty() ? "" : ",\n";
    events_ += event.dump(-1, ' ', false, json::error_handler_t::replace);  // names may be anything
  }

  std::string events_;
  std::set<std::pair<int, int>> named_;  // processes and threads
  int64_t arrows_ = 0;
};

}  // namespace

std::string to_trace(const Timeline& timeline) { return Trace(timeline).finish(); }

}  // namespace smp::pipeline
