// SPDX-License-Identifier: Apache-2.0
// Records of steps: how they are made, brought to one clock, and compared with the prediction.

#include "pipeline/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "pipeline/simulator.h"
#include "pipeline/timeline_page.h"
#include "pipeline/trace.h"
#include "tests/pipeline/timeline_cases.h"

namespace smp::pipeline {
namespace {

using nlohmann::json;

/// The same with two reductions beside the last actions, the second of which ends after them.
RankTimeline with_reductions(RankTimeline timeline) {
  for (size_t step = 0; step < timeline.steps.size(); ++step) {
    const int64_t begin = kOrigin + static_cast<int64_t>(step) * 20'000;
    timeline.steps[step].reductions = {{begin + 7000, begin + 7600, 512},
                                       {begin + 7600, begin + 9100, 256}};
  }
  return timeline;
}

// --- recording --------------------------------------------------------------------------------

TEST(TimelineRecorder, KeepsWhatItIsGiven) {
  const RankTimeline timeline = recorded(/*rank=*/1, /*steps=*/2);
  ASSERT_EQ(timeline.steps.size(), 2u);
  EXPECT_EQ(timeline.rank, 1);
  EXPECT_EQ(timeline.bytes, (std::vector<int64_t>{4096, 0, 0, 4096, 0}));
  EXPECT_EQ(timeline.steps[1].number, 8);
  EXPECT_EQ(timeline.steps[1].records[2].start, kOrigin + 22'500);
  EXPECT_EQ(timeline.steps[1].records[2].end, kOrigin + 25'000);
  EXPECT_EQ(timeline.kept, (std::vector<int64_t>{2048, 0, 0, 0, 0}));
}

TEST(TimelineRecorder, GivesStepsThatBegan) {
  TimelineRecorder recorder(0, 0, 3, 2);
  EXPECT_TRUE(recorder.has_room());
  recorder.begin_step(1);
  EXPECT_EQ(recorder.finish().steps.size(), 1u);
  recorder.begin_step(2);
  EXPECT_FALSE(recorder.has_room());
  expect_contains(error_of([&] { recorder.begin_step(3); }), "timeline: there is room for 2 steps");
  expect_contains(error_of([] { TimelineRecorder(0, 0, -1, 2); }),
                  "expected no negative number, got -1 actions and 2 steps");
}

TEST(TimelineRecorder, TakesWhatIsKeptFromTheSimulation) {
  const Schedule schedule = two_ranks();
  StageCosts costs = StageCosts::uniform(2);
  costs.kept = {100, 200};
  const Simulation simulation = simulate(schedule, chain_edges(2), costs);
  TimelineRecorder recorder(0, 1, 5, 1);
  recorder.set_kept(simulation.timeline[1]);
  recorder.begin_step(1);
  EXPECT_EQ(recorder.finish().kept, (std::vector<int64_t>{0, 200, 0, 0, 0}));
  expect_contains(error_of([&] { recorder.set_kept({}); }),
                  "expected what is kept after 5 actions, got 0");
}

TEST(TimelineRecorder, TakesTimesThatAreReadAfterTheStep) {
  TimelineRecorder recorder(0, 0, /*actions=*/2, /*steps=*/2);
  recorder.begin_step(1);
  recorder.record(0, 7, 8);
  recorder.begin_step(2);
  recorder.record(0, 0, 1);
  recorder.record(1, 2, 3);
  recorder.resolve({100, 140, 150, 190});
  const auto steps = recorder.finish().steps;
  EXPECT_EQ(steps[0].records[0].start, 7);
  EXPECT_EQ(steps[1].records[0].start, 100);
  EXPECT_EQ(steps[1].records[0].end, 140);
  EXPECT_EQ(steps[1].records[1].start, 150);
  EXPECT_EQ(steps[1].records[1].end, 190);
}

TEST(TimelineRecorder, ItsClockGoesForward) {
  const int64_t before = TimelineRecorder::now();
  EXPECT_GT(before, 0);
  EXPECT_GE(TimelineRecorder::now(), before);
}

TEST(TimelineMessage, ComesBackEqual) {
  for (const int steps : {0, 1, 3}) {
    const RankTimeline timeline = recorded(/*rank=*/0, steps, /*replica=*/2);
    EXPECT_TRUE(unpack_timeline(pack(timeline)) == timeline);
    const RankTimeline reduced = with_reductions(timeline);
    EXPECT_TRUE(unpack_timeline(pack(reduced)) == reduced);
    EXPECT_EQ(reduced == timeline, steps == 0);
  }
  EXPECT_FALSE(recorded(0) == recorded(1));
}

TEST(TimelineMessage, RefusesOtherNumbers) {
  const std::vector<int64_t> whole = pack(recorded(0));
  for (size_t length = 0; length < whole.size(); ++length) {
    const std::vector<int64_t> part(whole.begin(), whole.begin() + static_cast<long>(length));
    expect_contains(error_of([&] { unpack_timeline(part); }),
                    "the timeline of a rank does not fit");
  }
  auto longer = whole;
  longer.push_back(0);
  expect_contains(error_of([&] { unpack_timeline(longer); }),
                  "does not fit its 27 numbers at number 26");
  expect_contains(error_of([] { unpack_timeline({0, 0, -1}); }), "the timeline of a rank");
}

// --- clocks -----------------------------------------------------------------------------------

TEST(ClockOffset, ComesFromTheTripWithTheLeastDelay) {
  // The other clock is 5000 ahead; the second trip takes 100 there and 60 back.
  const ClockOffset offset =
      clock_offset({{0, 5900, 1000}, {2000, 7100, 2160}, {3000, 8050, 3400}});
  EXPECT_EQ(offset.offset, 5020);
  EXPECT_EQ(offset.error, 80);
}

TEST(ClockOffset, IsWithinItsError) {
  for (const int64_t ahead : {int64_t{-3'000'000'000}, int64_t{0}, int64_t{12'345}}) {
    for (int64_t there = 0; there < 50; there += 7) {
      for (int64_t back = 0; back < 50; back += 11) {
        const ClockOffset offset = clock_offset({{100, 100 + there + ahead, 100 + there + back}});
        EXPECT_LE(std::abs(offset.offset - ahead), offset.error);
      }
    }
  }
}

TEST(ClockOffset, KnowsItsOwnClock) {
  EXPECT_TRUE(clock_offset({{100, 100, 140}}).may_be_none()) << "answered at once";
  EXPECT_TRUE(clock_offset({{100, 140, 140}}).may_be_none()) << "answered at the end";
  EXPECT_FALSE(clock_offset({{100, 141, 140}}).may_be_none()) << "answered later than received";
  EXPECT_FALSE(clock_offset({{100, 99, 140}}).may_be_none()) << "answered before the question";
}

TEST(ClockOffset, NeedsTripsThatCanBe) {
  expect_contains(error_of([] { clock_offset({}); }), "expected a round trip");
  expect_contains(error_of([] {
                    clock_offset({{10, 0, 9}});
                  }),
                  "expected an answer after its question, got one sent at 10 ns and received at 9");
}

TEST(ClockOffset, BringsAnotherHostsTimesHome) {
  RankTimeline away = recorded(1, 2);
  away.shift(777'777);
  EXPECT_EQ(away.steps[1].records[2].start, kOrigin + 22'500 + 777'777);
  EXPECT_EQ(away.steps[1].records[2].end, kOrigin + 25'000 + 777'777);
  const ClockOffset offset = clock_offset({{100, 100 + 777'777, 100}});
  away.shift(-offset.offset);
  EXPECT_TRUE(away == recorded(1, 2));
}

// --- steps ------------------------------------------------------------------------------------

TEST(Timeline, HasTheTimesOfAStepMadeByHand) {
  const Timeline timeline = measured(/*steps=*/2);
  ASSERT_EQ(timeline.measured.size(), 2u);
  const StepTimeline& step = timeline.measured[1];
  EXPECT_EQ(step.name, "step 8");
  EXPECT_DOUBLE_EQ(step.begin, 20);
  EXPECT_DOUBLE_EQ(step.makespan, 8.5);
  ASSERT_EQ(step.lanes.size(), 2u);
  EXPECT_EQ(step.lanes[1].rank, 1);
  EXPECT_DOUBLE_EQ(step.lanes[0].busy(), 3.7);
  EXPECT_DOUBLE_EQ(step.lanes[1].busy(), 4.0);
  EXPECT_DOUBLE_EQ(step.idle(step.lanes[0]), 4.8 / 8.5);
  EXPECT_DOUBLE_EQ(step.idle(step.lanes[1]), 4.5 / 8.5);
  EXPECT_DOUBLE_EQ(step.idle(), 9.3 / 17);
  EXPECT_DOUBLE_EQ(step.lanes[1].time("backward"), 2.5);
  EXPECT_DOUBLE_EQ(step.lanes[0].peak_memory(), 2048);
}

TEST(Timeline, HasTheReductionsBesideTheActions) {
  RankTimeline moved = with_reductions(recorded(0));
  moved.shift(500);
  moved.shift(-500);
  const Timeline timeline = make_timeline("", two_ranks(), {moved, recorded(1)}, nullptr);
  const StepTimeline& step = timeline.measured[0];
  EXPECT_DOUBLE_EQ(step.makespan, 9.1) << "what ends last ends the step";
  ASSERT_EQ(step.lanes[0].reductions.size(), 2u);
  EXPECT_TRUE(step.lanes[1].reductions.empty());
  EXPECT_DOUBLE_EQ(step.lanes[0].reductions[0].start, 7);
  EXPECT_DOUBLE_EQ(step.lanes[0].reductions[1].end, 9.1);
  EXPECT_EQ(step.lanes[0].reductions[1].bytes, 256);

  std::vector<json> found;
  const json events = json::parse(to_trace(timeline)).at("traceEvents");
  for (const json& event : events) {
    if (event.at("ph") == "X" && event.at("tid").get<int>() > 1) found.push_back(event);
  }
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].at("name"), "bucket 1 of 2 summed over the replicas");
  EXPECT_DOUBLE_EQ(found[0].at("ts").get<double>(), 7);
  EXPECT_NEAR(found[0].at("dur").get<double>(), 0.6, 1e-9);
  EXPECT_EQ(found[1].at("args"), (json{{"step", "step 7"}, {"bytes", 256}}));
  EXPECT_EQ(std::count_if(events.begin(), events.end(),
                          [](const json& event) {
                            return event.at("name") == "thread_name" &&
                                   event.at("args").at("name") == "rank 0 reduces";
                          }),
            1);

  const json shown = json::parse(page_data(timeline)).at("steps")[0].at("lanes")[0];
  ASSERT_EQ(shown.at("reductions").size(), 2u);
  const json& second = shown["reductions"][1];
  EXPECT_EQ(second.at("text"), "bucket 2 of 2 summed over the replicas");
  EXPECT_NEAR(second.at("start").get<double>(), 7.6, 1e-9);
  EXPECT_NEAR(second.at("end").get<double>(), 9.1, 1e-9);
  EXPECT_EQ(second.at("bytes"), 256);
}

TEST(Timeline, PredictsWhatTheSimulatorSays) {
  for (const Schedule& schedule : schedules()) {
    const Simulation simulation = simulated(schedule);
    const StepTimeline step = predicted_timeline(simulation);
    EXPECT_EQ(step.makespan, simulation.makespan);
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      EXPECT_NEAR(step.idle(step.lanes[rank]) * simulation.makespan, simulation.idle[rank], 1e-9);
    }
    EXPECT_NEAR(step.idle(), simulation.bubble(), 1e-12);
  }
}

TEST(Timeline, SaysWhatDoesNotFit) {
  const auto error = [](const std::vector<RankTimeline>& ranks) {
    return error_of([&] { make_timeline("", two_ranks(), ranks, nullptr); });
  };
  expect_contains(error({}), "expected what every rank recorded, got nothing");
  expect_contains(error({recorded(0)}), "expected all 2 ranks of each replica, got 1 ranks");
  expect_contains(error({recorded(1)}), "expected that of rank 0 of replica 0");
  expect_contains(error({recorded(0), recorded(0)}), "expected that of rank 1 of replica 0");
  expect_contains(error({recorded(0, 2), recorded(1, 1)}), "expected 2 steps, got 1.");
  auto other = recorded(1);
  other.steps[0].number = 9;
  expect_contains(error({recorded(0), other}),
                  "timeline of rank 1 of replica 0: expected step 7, got step 9");
  other = recorded(1);
  other.bytes.pop_back();
  expect_contains(error({recorded(0), other}), "expected the schedule's 5 actions, got 4");
}

TEST(Timeline, FindsTheReceiveOfEachSend) {
  for (const Schedule& schedule : schedules()) {
    const StepTimeline step = predicted_timeline(simulated(schedule));
    size_t sends = 0;
    for (const Lane& lane : step.lanes) {
      sends += std::count_if(lane.actions.begin(), lane.actions.end(),
                             [](const TimedAction& timed) { return timed.action.is_send(); });
    }
    const auto deliveries = deliveries_of(step);
    EXPECT_EQ(deliveries.size(), sends);
    for (const Delivery& delivery : deliveries) {
      EXPECT_EQ(counterpart(step.lanes[delivery.from_lane].actions[delivery.send].action),
                step.lanes[delivery.to_lane].actions[delivery.receive].action);
    }
  }
}

TEST(Timeline, KeepsReplicasApart) {
  const Timeline timeline = make_timeline(
      "", two_ranks(), {recorded(0, 1, 1), recorded(1, 1, 0), recorded(1, 1, 1), recorded(0, 1, 0)},
      nullptr);
  const StepTimeline& step = timeline.measured[0];
  ASSERT_EQ(step.lanes.size(), 4u);
  EXPECT_EQ(step.lanes[2].replica, 1);
  EXPECT_EQ(step.lanes[2].rank, 0);
  const auto deliveries = deliveries_of(step);
  EXPECT_EQ(deliveries.size(), 4u);
  for (const Delivery& delivery : deliveries) {
    EXPECT_EQ(step.lanes[delivery.from_lane].replica, step.lanes[delivery.to_lane].replica);
  }
}

// --- text -------------------------------------------------------------------------------------

TEST(TimelineText, ComparesMeasuredAndPredicted) {
  Simulation simulation = simulated(two_ranks());  // 6 long, each rank busy for 3
  EXPECT_EQ(
      to_string(measured(1, &simulation)),
      "step 7: 8.5 us, 54.7% idle; predicted: 6 us, 50.0% idle (measured +41.7%)\n"
      "\n"
      "  rank   idle  predicted  forward  backward  send  reduce   wait  other  kept at most\n"
      "  ----  -----  ---------  -------  --------  ----  ------  -----  -----  ------------\n"
      "     0  56.5%      50.0%    11.8%     23.5%  2.4%    5.9%  56.5%   0.0%       2.0 KiB\n"
      "     1  52.9%      50.0%    11.8%     29.4%  5.9%    0.0%  17.6%  35.3%       2.0 KiB\n");
}

TEST(TimelineText, ShowsThePredictionAlone) {
  Timeline timeline;
  timeline.unit = TimeUnit::kSlots;
  timeline.predicted = predicted_timeline(simulated(two_ranks()));
  EXPECT_EQ(to_string(timeline),
            "predicted: 6 slots, 50.0% idle\n"
            "\n"
            "  rank   idle  forward  backward   wait  other\n"
            "  ----  -----  -------  --------  -----  -----\n"
            "     0  50.0%    16.7%     33.3%  50.0%   0.0%\n"
            "     1  50.0%    16.7%     33.3%  16.7%  33.3%\n");
}

}  // namespace
}  // namespace smp::pipeline
