// SPDX-License-Identifier: Apache-2.0
#include "pipeline/measured_costs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "pipeline/simulator.h"
#include "tests/pipeline/schedule_helpers.h"

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;

int count(const Schedule& schedule, Kind kind) {
  int found = 0;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto& actions = schedule.actions(rank);
    found += static_cast<int>(std::count_if(actions.begin(), actions.end(),
                                            [&](const auto& one) { return one.kind == kind; }));
  }
  return found;
}

// --- exchanging backwards ---------------------------------------------------------------------

TEST(ExchangeBackwards, KeepsTheOrder) {
  const Schedule schedule =
      lower(parse_schedule("schedule ranks=2 microbatches=2 backward=yes rank_of_stage=0,1\n"
                           "rank 0: 0F0 0F1 0B0 0I1 0W1\n"
                           "rank 1: 1F0 1I0 1F1 1W0 1B1\n"),
            chain_edges(2));
  EXPECT_EQ(to_string(exchange_backwards(schedule, ScheduleOptions(2, 2))),
            to_string(lower(
                parse_schedule("schedule ranks=2 microbatches=2 backward=yes rank_of_stage=0,1\n"
                               "rank 0: 0F0 0F1 0I0 0W0 0B1\n"
                               "rank 1: 1F0 1B0 1F1 1I1 1W1\n"),
                chain_edges(2))));
}

TEST(ExchangeBackwards, OfEveryScheduleIsRightAndKeepsNoMore) {
  for (const auto& kind : schedule_kinds()) {
    if (!kind.trains) continue;
    for (int ranks = 1; ranks <= 4; ++ranks) {
      for (int microbatches = 1; microbatches <= 6; ++microbatches) {
        SCOPED_TRACE(kind.name + ", " + std::to_string(ranks) + " ranks, " +
                     std::to_string(microbatches) + " microbatches");
        const auto placed = kind.place(ranks, 0, microbatches);
        auto costs = StageCosts::uniform(placed.stages());
        costs.kept.assign(placed.stages(), 1);
        const auto options = ScheduleOptions(placed).costs(costs);
        const Schedule schedule = lowered(kind, options);
        const Schedule exchanged = exchange_backwards(schedule, options);
        verify(exchanged, options.edges(), VerifyOptions().credit(microbatches));
        EXPECT_EQ(count(exchanged, Kind::kBackward), count(schedule, Kind::kBackwardInput));
        EXPECT_EQ(count(exchanged, Kind::kBackwardInput), count(schedule, Kind::kBackward));
        const auto before = simulate(schedule, options.edges(), costs).peak_memory;
        const auto after = simulate(exchanged, options.edges(), costs).peak_memory;
        for (int rank = 0; rank < ranks; ++rank) EXPECT_LE(after[rank], before[rank]);
      }
    }
  }
}

/// Between its halves a backward may keep more than before them.
TEST(ExchangeBackwards, LeavesThoseOfARankWhereTheyWouldNotFit) {
  const Schedule schedule = lowered(one_forward_one_backward, ScheduleOptions(2, 3));
  auto costs = StageCosts::uniform(2);
  costs.kept = {1, 1};
  costs.gradients_for_weights = {0.25, 0.25};
  const auto halves = [&](const std::vector<double>& limit) {
    const auto options = ScheduleOptions(2, 3).costs(costs).memory_limit(limit);
    const Schedule exchanged = exchange_backwards(schedule, options);
    const auto peaks = simulate(exchanged, options.edges(), costs).peak_memory;
    for (size_t rank = 0; rank < limit.size(); ++rank) EXPECT_LE(peaks[rank], limit[rank]);
    return count(exchanged, Kind::kBackwardInput);
  };
  EXPECT_EQ(halves({}), 6);
  EXPECT_EQ(halves({2.25, 1.25}), 6);
  EXPECT_EQ(halves({2, 1.25}), 3);
  EXPECT_EQ(halves({2, 1}), 0);
}

// --- measuring --------------------------------------------------------------------------------

/// Costs that no other stage, edge or direction has.
StageCosts known_costs() {
  StageCosts costs;
  costs.forward = {10, 21, 33};
  costs.backward = {19, 44, 65};
  costs.backward_input = {9, 23, 31};
  costs.backward_weight = {12, 22, 37};
  costs.latency = {2.5, 3.5};
  costs.backward_latency = {1.5, 4.5};
  costs.send = {0.5, 0.75};
  costs.kept = {1, 2, 3};
  return costs;
}

/// A step that takes exactly the time in `costs`.
StepTimeline step_of(const Schedule& schedule, const StageCosts& costs) {
  return predicted_timeline(simulate(schedule, chain_edges(schedule.stages()), costs));
}

/// Under a schedule and its exchange.
std::vector<Timeline> recorded(const StageCosts& costs) {
  const auto edges = chain_edges(3);
  const auto schedule = lower(one_forward_one_backward(ScheduleOptions(3, 5)), edges);
  Timeline whole, split;
  whole.measured = {step_of(schedule, costs)};
  split.measured = {step_of(exchange_backwards(schedule, ScheduleOptions(3, 5)), costs)};
  return {whole, split};
}

void expect_near(const std::vector<double>& got, const std::vector<double>& expected,
                 const char* what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-9) << what << i;
}

void expect_same(const StageCosts& got, const StageCosts& expected) {
  expect_near(got.forward, expected.forward, "forward");
  expect_near(got.backward, expected.backward, "backward");
  expect_near(got.backward_input, expected.backward_input, "backward_input");
  expect_near(got.backward_weight, expected.backward_weight, "backward_weight");
  expect_near(got.latency, expected.latency, "latency");
  expect_near(got.backward_latency, expected.backward_latency, "backward_latency");
  expect_near(got.send, expected.send, "send");
  expect_near(got.kept, expected.kept, "kept");
}

StageCosts planned() {
  auto costs = StageCosts::uniform(3, 100, 100, 100);
  costs.kept = {1, 2, 3};
  return costs;
}

TEST(MeasuredCosts, AreThoseThatTheStepsWereMadeOf) {
  expect_same(measured_costs(recorded(known_costs()), chain_edges(3), planned()), known_costs());
}

TEST(MeasuredCosts, AreMediansOverMicrobatches) {
  auto steps = recorded(known_costs());
  for (Timeline& timeline : steps) {
    for (Lane& lane : timeline.measured[0].lanes) {
      for (TimedAction& timed : lane.actions) {
        // One of five microbatches is slow and one fast.
        if (timed.action.microbatch == 1 && timed.action.is_compute()) timed.end += 1000;
        if (timed.action.microbatch == 2 && timed.action.is_compute()) timed.end = timed.start;
      }
    }
  }
  const auto costs = measured_costs(steps, chain_edges(3), planned());
  expect_near(costs.forward, known_costs().forward, "forward");
  expect_near(costs.backward, known_costs().backward, "backward");
  expect_near(costs.backward_input, known_costs().backward_input, "backward_input");
  expect_near(costs.backward_weight, known_costs().backward_weight, "backward_weight");
}

TEST(MeasuredCosts, AreThoseOfTheSlowestReplica) {
  auto slow = known_costs();
  slow.forward[2] = 50;
  auto steps = recorded(known_costs());
  auto of_other = recorded(slow);
  for (size_t i = 0; i < steps.size(); ++i) {
    for (Lane& lane : of_other[i].measured[0].lanes) {
      lane.replica = 1;
      steps[i].measured[0].lanes.push_back(lane);
    }
  }
  expect_same(measured_costs(steps, chain_edges(3), planned()), slow);
}

TEST(MeasuredCosts, KeepWhatWasPlannedOfWhatDidNotRun) {
  auto steps = recorded(known_costs());
  steps.pop_back();  // the one with split backwards
  const auto costs = measured_costs(steps, chain_edges(3), planned());
  expect_near(costs.backward, known_costs().backward, "backward");
  expect_near(costs.backward_weight, {100, 100, 100}, "backward_weight");
}

TEST(MeasuredCosts, CountTheReceiptOfAMessageThatIsThereForItsStage) {
  // Rank 1 begins late: its receives of values wait for nothing and take 2 each.
  auto step = step_of(lower(simple(ScheduleOptions(2, 3)), chain_edges(2)),
                      StageCosts::uniform(2, 10, 10, 10));
  for (TimedAction& timed : step.lanes[1].actions) {
    timed.start += 1000;
    timed.end += 1000;
    if (timed.action.kind == Kind::kRecvForward) timed.start = timed.end - 2;
  }
  Timeline timeline;
  timeline.measured = {step};
  const auto costs = measured_costs({timeline}, chain_edges(2), StageCosts::uniform(2, 1, 1, 1));
  expect_near(costs.forward, {10, 12}, "forward");
  expect_near(costs.latency, {0}, "latency");
}

TEST(Median, IsTheMiddleOne) {
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({9, 1, 5}), 5);
  EXPECT_EQ(median({1, 2, 3, 4}), 3);
}

}  // namespace
}  // namespace smp::pipeline
