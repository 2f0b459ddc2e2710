// SPDX-License-Identifier: Apache-2.0
// Recorded steps of units as steps of their stages.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pipeline/frame.h"
#include "pipeline/measured_costs.h"
#include "pipeline/timeline.h"
#include "pipeline/unsharding.h"
#include "tests/pipeline/schedule_helpers.h"

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;
using Key = std::tuple<Kind, int, int, int>;
using Times = std::pair<double, double>;

Timeline timeline_of(std::vector<Lane> lanes) {
  Timeline timeline;
  timeline.measured.push_back({"step 3", 5, 1000, std::move(lanes)});
  return timeline;
}

bool is_gather(const Action& action) {
  return action.kind == Kind::kUnshard || action.kind == Kind::kReshard;
}

TEST(TimelineOfStages, TakeTheTimesOfAllUnits) {
  // Units 0 and 1 are stage 0, units 2 and 3 stage 1 of another rank.
  Lane lane{2, 0, {}, {}, {{20, 30, 4096}}};
  const auto add = [&](const char* action, double start, double end, double memory) {
    lane.actions.push_back({parse_action(action), start, end, memory});
  };
  add("0UNSHARD", 0, 1, 0);
  add("1UNSHARD", 1, 2, 0);
  add("0F0", 10, 20, 100);  // waited for parameters before
  add("0SEND_F0>2", 20, 23, 100);
  add("0RESHARD", 23, 24, 100);
  add("1F0", 30, 40, 300);  // waited for parameters, too
  add("1SEND_F0>2", 40, 42, 300);
  add("1SEND_F0>3", 42, 47, 300);
  add("1RESHARD", 47, 48, 300);
  const Timeline stages = timeline_of_stages(timeline_of({lane}), {0, 0, 1, 1});
  const StepTimeline& step = stages.measured.at(0);
  EXPECT_EQ(step.name, "step 3");
  EXPECT_EQ(step.begin, 5);
  EXPECT_EQ(step.makespan, 1000);
  const Lane& result = step.lanes.at(0);
  EXPECT_EQ(result.replica, 2);
  ASSERT_EQ(result.reductions.size(), 1U);
  EXPECT_EQ(result.reductions[0].bytes, 4096);
  std::string text;
  for (const TimedAction& timed : result.actions) {
    text += c10::str(to_string(timed.action), " ", timed.start, " to ", timed.end, " keeps ",
                     timed.memory, "\n");
  }
  EXPECT_EQ(text,
            "0UNSHARD 0 to 1 keeps 0\n"
            "0UNSHARD 1 to 2 keeps 0\n"
            "0F0 20 to 40 keeps 300\n"         // 10 + 10
            "0SEND_F0>1 37 to 47 keeps 300\n"  // 3 + 2 + 5
            "0RESHARD 23 to 24 keeps 100\n"
            "0RESHARD 47 to 48 keeps 300\n");
}

// --- brute force ------------------------------------------------------------------------------

/// Units of stages, in a list with times that are made up.
struct MadeUp {
  std::vector<int> stage_of_unit;
  Timeline timeline;

  Action of_stage(Action unit) const {
    unit.stage = stage_of_unit[static_cast<size_t>(unit.stage)];
    if (unit.peer >= 0) unit.peer = stage_of_unit[static_cast<size_t>(unit.peer)];
    return unit;
  }
  Key key_of(const Action& unit) const {
    const Action action = of_stage(unit);
    return {action.kind, action.stage, action.microbatch, action.peer};
  }
};

MadeUp made_up(const ScheduleKind& kind, const ScheduleOptions& options, std::mt19937& random) {
  const auto draw = [&](int most) { return static_cast<int>(random() % (most + 1)); };
  const Schedule stages = kind.generate(options);
  MadeUp result;
  std::vector<StageReads> reads;
  for (int stage = 0; stage < stages.stages(); ++stage) {
    for (int unit = draw(3); unit >= 0; --unit) {
      result.stage_of_unit.push_back(stage);
      const int64_t forward = draw(4);
      reads.push_back({forward, kind.trains ? std::min<int64_t>(forward, draw(4)) : 0});
    }
  }
  const auto count = static_cast<int>(result.stage_of_unit.size());
  std::vector<StageEdge> edges;
  for (const StageEdge& edge : all_pairs(count)) {
    if (edge.to == edge.from + 1 || draw(3) == 0) edges.push_back(edge);
  }
  Frame frame;
  for (int unit = 0; unit < count; ++unit) {
    if (draw(2) == 0) frame.outputs.push_back(unit);
  }
  frame.loading_horizon = draw(2);
  const std::vector<bool> backward(result.stage_of_unit.size(), kind.trains);
  const Schedule order = order_of_units(stages, result.stage_of_unit, backward);
  const Schedule schedule =
      with_frame(with_unsharding(lower(order, edges), reads, 1 + draw(8)), frame);
  std::vector<Lane> lanes;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    Lane lane{0, rank, {}, {}};
    double now = 0;
    for (const Action& action : schedule.actions(rank)) {
      now += draw(3);
      const double start = std::exchange(now, now + draw(20));
      lane.actions.push_back({action, start, now, static_cast<double>(draw(100))});
    }
    lanes.push_back(std::move(lane));
  }
  result.timeline = timeline_of(std::move(lanes));
  return result;
}

/// The times of all actions but gathers, each found by looking through the whole list.
std::map<Key, Times> times_of_stages(const MadeUp& made_up, const Lane& units) {
  std::map<Key, Times> result;
  for (const TimedAction& one : units.actions) {
    if (is_gather(one.action)) continue;
    double sum = 0, end = 0;
    for (const TimedAction& other : units.actions) {
      if (made_up.key_of(other.action) != made_up.key_of(one.action)) continue;
      sum += other.end - other.start;
      end = std::max(end, other.end);
    }
    result[made_up.key_of(one.action)] = {end - sum, end};
  }
  return result;
}

std::vector<std::string> gathers_of(const MadeUp& made_up, const Lane& units) {
  std::vector<std::string> result;
  for (const TimedAction& timed : units.actions) {
    if (!is_gather(timed.action)) continue;
    result.push_back(c10::str(to_string(made_up.of_stage(timed.action)), " ", timed.start));
  }
  return result;
}

TEST(TimelineOfStages, AreThoseOfABruteForce) {
  std::mt19937 random(7);
  int runs = 0;
  size_t joined = 0;
  for (int seed = 0; seed < 10; ++seed) {
    for (const auto& kind : schedule_kinds()) {
      const auto options = kind.place(1 + seed % 4, 0, 1 + seed % 3);
      if (kind.why_misplaced(options)) continue;
      SCOPED_TRACE(c10::str(kind.name, ", seed ", seed));
      const MadeUp made = made_up(kind, options, random);
      const Timeline stages = timeline_of_stages(made.timeline, made.stage_of_unit);
      for (size_t rank = 0; rank < stages.measured[0].lanes.size(); ++rank) {
        const Lane& units = made.timeline.measured[0].lanes[rank];
        std::map<Key, Times> found;
        std::vector<std::string> gathers;
        for (const TimedAction& timed : stages.measured[0].lanes[rank].actions) {
          const auto& [action, start, end, memory] = timed;
          if (is_gather(action)) {
            gathers.push_back(c10::str(to_string(action), " ", start));
            continue;
          }
          const Key key(action.kind, action.stage, action.microbatch, action.peer);
          EXPECT_TRUE(found.emplace(key, Times(start, end)).second) << to_string(action);
        }
        EXPECT_EQ(found, times_of_stages(made, units));
        EXPECT_EQ(gathers, gathers_of(made, units));
        joined += units.actions.size() - found.size();
      }
      ++runs;
    }
  }
  EXPECT_GT(runs, 60);
  EXPECT_GT(joined, 1000U);
}

// --- costs ------------------------------------------------------------------------------------

/// Three stages of two, one and three units: the costs of stages are the sums of their units'.
TEST(TimelineOfStages, TellTheCostsOfStages) {
  const std::vector<int> stage_of_unit = {0, 0, 1, 2, 2, 2};
  StageCosts units, stages;
  units.forward = {4, 6, 21, 11, 10, 12};
  units.backward = {10, 9, 44, 25, 20, 20};
  units.backward_input = {5, 4, 23, 10, 10, 11};
  units.backward_weight = {6, 6, 22, 12, 12, 13};
  units.latency = {0, 2.5, 3.5, 0, 0};
  units.backward_latency = {0, 1.5, 4.5, 0, 0};
  units.send = {0, 0.5, 0.75, 0, 0};
  stages.forward = {10, 21, 33};
  stages.backward = {19, 44, 65};
  stages.backward_input = {9, 23, 31};
  stages.backward_weight = {12, 22, 37};
  const auto edges = chain_edges(3), edges_of_units = chain_edges(6);
  const Schedule first = lowered(one_forward_one_backward, ScheduleOptions(3, 5));
  std::vector<Timeline> recorded;
  for (const Schedule& schedule : {first, exchange_backwards(first, ScheduleOptions(3, 5))}) {
    const Schedule order = order_of_units(schedule, stage_of_unit, std::vector<bool>(6, true));
    const Schedule divided = with_unsharding(lower(order, edges_of_units),
                                             std::vector<StageReads>(6, {5, 5}), /*most=*/10);
    Timeline timeline;
    timeline.measured = {predicted_timeline(simulate(divided, edges_of_units, units))};
    recorded.push_back(timeline_of_stages(timeline, stage_of_unit));
  }
  const auto costs = measured_costs(recorded, edges, StageCosts::uniform(3, 100, 100, 100));
  EXPECT_EQ(costs.forward, stages.forward);
  EXPECT_EQ(costs.backward, stages.backward);
  EXPECT_EQ(costs.backward_input, stages.backward_input);
  EXPECT_EQ(costs.backward_weight, stages.backward_weight);
  EXPECT_EQ(costs.latency, (std::vector<double>{2.5, 3.5}));
  EXPECT_EQ(costs.backward_latency, (std::vector<double>{1.5, 4.5}));
  EXPECT_EQ(costs.send, (std::vector<double>{0.5, 0.75}));
}

}  // namespace
}  // namespace smp::pipeline
