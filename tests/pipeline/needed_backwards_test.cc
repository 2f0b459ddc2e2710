// SPDX-License-Identifier: Apache-2.0
// Schedules of pipelines whose first stages are frozen: they have no backward.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "pipeline/generators.h"
#include "pipeline/schedule_file.h"
#include "pipeline/simulator.h"
#include "pipeline/verifier.h"
#include "tests/pipeline/schedule_helpers.h"

namespace smp::pipeline {
namespace {

/// The first `frozen` of its stages need no gradient.
ScheduleOptions frozen(ScheduleOptions options, int frozen) {
  auto edges = options.edges();
  for (auto& edge : edges) edge.needs_gradient = edge.from >= frozen;
  std::vector<bool> backward(static_cast<size_t>(options.stages()), true);
  std::fill(backward.begin(), backward.begin() + frozen, false);
  return options.edges(edges).backward_of_stage(backward);
}

TEST(NeededBackwards, TheFirstStageRunsForwardsOnly) {
  const auto options = frozen(ScheduleOptions(2, 2), 1);
  const auto schedule = lower(make_schedule("1f1b", options), options.edges());
  EXPECT_EQ(to_string(schedule),
            "schedule ranks=2 microbatches=2 backward=1 rank_of_stage=0,1\n"
            "rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1\n"
            "rank 1: 1RECV_F0<0 1F0 1B0 1RECV_F1<0 1F1 1B1 1REDUCE\n");
  EXPECT_TRUE(schedule.has_backward());
  EXPECT_FALSE(schedule.has_backward(0));
  EXPECT_TRUE(schedule.has_backward(1));
}

// Counts the actions that are there: every stage that needs a backward has one for each microbatch,
// whole or in halves, and the others have none.
TEST(NeededBackwards, EveryScheduleHasTheseAndNoOthers) {
  for (const auto& kind : schedule_kinds()) {
    for (const int ranks : {2, 3}) {
      for (const int stages_frozen : {1, 2}) {
        const auto options = frozen(kind.place(ranks, 0, 4), stages_frozen);
        const auto schedule = lower(kind.generate(options), options.edges());
        const auto credit = required_credit(schedule, options.edges());
        verify(schedule, options.edges(), VerifyOptions().credit(credit));
        std::vector<int> backwards(options.stages()), reduces(options.stages());
        for (int rank = 0; rank < ranks; ++rank) {
          for (const auto& action : schedule.actions(rank)) {
            backwards[action.stage] += action.makes_weight_gradients() ? 1 : 0;
            reduces[action.stage] += action.kind == Action::Kind::kReduce ? 1 : 0;
          }
        }
        for (int stage = 0; stage < options.stages(); ++stage) {
          const bool has = kind.trains && stage >= stages_frozen;
          EXPECT_EQ(backwards[stage], has ? 4 : 0) << kind.name << " stage " << stage;
          EXPECT_EQ(reduces[stage], has ? 1 : 0) << kind.name << " stage " << stage;
        }
        EXPECT_EQ(parse_schedule(to_string(schedule)), schedule);
        EXPECT_EQ(schedule_from_json(schedule_to_json(schedule), "x.json"), schedule);
        const auto order = kind.generate(options);
        EXPECT_EQ(schedule_from_csv(csv_of(order), "x.csv"), order);
      }
    }
  }
}

// F = I = W = 1. With a frozen first stage the second rank is the only one that has backwards: it
// waits for the first forward, and then works all the time.
TEST(NeededBackwards, TakeNoTimeAndNoMemory) {
  auto costs = StageCosts::uniform(2);
  costs.kept = {1, 1};
  const auto options = frozen(ScheduleOptions(2, 4), 1).costs(costs);
  for (const char* name : {"1f1b", "interleaved", "zb_h1", "list"}) {
    const auto simulation = simulate(lower(make_schedule(name, options), options.edges()),
                                     options.edges(), options.costs());
    EXPECT_EQ(simulation.makespan, 1 + 4 * 3) << name;
    EXPECT_EQ(simulation.busy[0], 4) << name;
    EXPECT_EQ(simulation.peak_memory[0], 0) << name;
  }
}

TEST(NeededBackwards, TheVerifierKnowsWhoHasOne) {
  const auto error = [](const std::string& header, const std::string& first) {
    auto edges = chain_edges(2);
    edges[0].needs_gradient = header.find("backward=0") != std::string::npos;
    return verify_error(parse_schedule("schedule ranks=2 microbatches=1 " + header +
                                       " rank_of_stage=0,1\nrank 0: " + first +
                                       "\nrank 1: 1RECV_F0<0 1F0 1B0 1REDUCE\n"),
                        edges);
  };
  EXPECT_EQ(error("backward=1", "0F0 0SEND_F0>1"), "");
  expect_contains(error("backward=1", "0F0 0SEND_F0>1 0B0"),
                  "rank 0 at action 2 (0B0): stage 0 has no backward, expected its forwards and "
                  "their transfers only.");
  expect_contains(error("backward=1", "0F0 0SEND_F0>1 0REDUCE"), "stage 0 has no backward");
  expect_contains(error("backward=0", "0F0 0SEND_F0>1"), "stage 1 has no backward");
  expect_contains(
      error_of([] {
        auto options = frozen(ScheduleOptions(2, 1), 1);
        verify(lower(make_schedule("simple", options), options.edges()), chain_edges(2));
      }),
      "stage 0 has no backward, but gradients go from stage 1 to stage 0. Give it one.");
}

TEST(NeededBackwards, AMicrobatchOfAFrozenStageIsFinishedWithItsForward) {
  const auto options = frozen(ScheduleOptions(2, 4), 1);
  const auto schedule = lower(make_schedule("interleaved", options), options.edges());
  verify(schedule, options.edges(),
         VerifyOptions().active_microbatches(options.active_microbatches()).credit(4));
  const auto eager = parse_schedule(
      "schedule ranks=1 microbatches=2 backward=1 rank_of_stage=0,0\n"
      "rank 0: 0F0 1F0 0F1 1F1 1B0 1B1 1REDUCE\n");
  auto edges = chain_edges(2);
  edges[0].needs_gradient = false;
  expect_contains(verify_error(eager, edges, VerifyOptions().active_microbatches(1)),
                  "makes 2 microbatches in flight");
}

TEST(NeededBackwards, AreToldOfEachStage) {
  expect_contains(error_of([] {
                    Schedule(1, 1, {0, 0}, std::vector<bool>{true});
                  }),
                  "a schedule of 2 stages was told of 1 whether they have a backward");
  expect_contains(
      error_of([] { make_schedule("simple", ScheduleOptions(2, 1).backward_of_stage({true})); }),
      "schedule option backward_of_stage: expected true or false for each of 2 stages, got 1.");
  expect_contains(
      error_of(
          [] { parse_schedule("schedule ranks=1 microbatches=1 backward=1 rank_of_stage=0"); }),
      "expected \"backward=yes\", \"backward=no\" or stages as in \"backward=1,2\", got "
      "\"backward=1\"");
}

}  // namespace
}  // namespace smp::pipeline
