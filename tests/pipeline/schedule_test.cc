// SPDX-License-Identifier: Apache-2.0
#include "pipeline/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "pipeline/action.h"
#include "pipeline/generators.h"
#include "pipeline/simulator.h"
#include "pipeline/verifier.h"
#include "tests/pipeline/schedule_helpers.h"

namespace smp::pipeline {
namespace {

std::string picture(Generator generator, const ScheduleOptions& options) {
  return draw(
      simulate(lowered(generator, options), options.edges(), StageCosts::unit(options.stages())));
}

// --- actions and text -----------------------------------------------------------------------

TEST(Action, PrintsAndParses) {
  const std::vector<std::pair<Action, std::string>> cases = {
      {forward_of(0, 3), "0F3"},
      {backward_of(1, 0), "1B0"},
      {backward_input_of(1, 0), "1I0"},
      {backward_weight_of(21, 7), "21W7"},
      {send_forward(0, 3, 1), "0SEND_F3>1"},
      {recv_forward(1, 3, 0), "1RECV_F3<0"},
      {send_backward(12, 345, 6), "12SEND_B345>6"},
      {recv_backward(0, 3, 1), "0RECV_B3<1"},
      {reduce_of(1), "1REDUCE"},
      {unshard_of(3), "3UNSHARD"},
      {reshard_of(3), "3RESHARD"},
  };
  for (const auto& [action, text] : cases) {
    EXPECT_EQ(to_string(action), text);
    EXPECT_EQ(parse_action(text), action) << text;
  }
  EXPECT_EQ(counterpart(send_forward(0, 3, 2)), recv_forward(2, 3, 0));
  EXPECT_EQ(counterpart(recv_backward(0, 3, 2)), send_backward(2, 3, 0));
}

TEST(Action, ParseErrorsSayWhere) {
  const auto parse_error = [](const std::string& text) {
    return error_of([&] { parse_action(text, "line 3, column 9"); });
  };
  expect_contains(
      parse_error("x"),
      "cannot read the action \"x\" at line 3, column 9: position 0: expected a stage "
      "number, got \"x\". Actions look like 0F3, 1B0, 0SEND_F3>1, 1RECV_F3<0 or 1REDUCE.");
  expect_contains(parse_error("0X3"), "position 1: expected F, B, I, W, SEND_F");
  expect_contains(parse_error("0F"), "position 2: expected a microbatch number, got the end");
  expect_contains(parse_error("0F-1"), "position 2: expected a microbatch number, got \"-1\"");
  expect_contains(parse_error("0SEND_F3<1"),
                  "position 8: expected '>' and the stage sent to, got \"<1\"");
  expect_contains(parse_error("1RECV_B3"), "position 8: expected '<' and the stage received from");
  expect_contains(parse_error("1REDUCE2"), "position 7: expected the end of the action, got \"2\"");
  expect_contains(parse_error("99999999999F0"), "position 0: expected a stage number");
}

TEST(Schedule, HasTheDocumentedText) {
  const auto schedule = lowered(simple, ScheduleOptions(2, 1));
  const std::string text =
      "schedule ranks=2 microbatches=1 backward=yes rank_of_stage=0,1\n"
      "rank 0: 0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE\n"
      "rank 1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE\n";
  EXPECT_EQ(to_string(schedule), text);
  EXPECT_EQ(parse_schedule("# a comment\n\n" + text), schedule);
}

TEST(Schedule, ParseErrorsSayWhere) {
  const auto parse_error = [](const std::string& text) {
    return error_of([&] { parse_schedule(text); });
  };
  const std::string header = "schedule ranks=2 microbatches=1 backward=yes rank_of_stage=0,1\n";
  expect_contains(parse_error(""),
                  "line 1, column 1: expected \"schedule\", got the end of the line");
  expect_contains(parse_error("schedule ranks=two"),
                  "line 1: expected a number in \"ranks=...\", got \"two\"");
  expect_contains(parse_error("schedule microbatches=1"),
                  "line 1, column 10: expected \"ranks=...\"");
  expect_contains(parse_error("schedule ranks=1 microbatches=1 backward=maybe rank_of_stage=0"),
                  "line 1, column 33: expected \"backward=yes\", \"backward=no\" or stages as in "
                  "\"backward=1,2\", got "
                  "\"backward=maybe\"");
  expect_contains(parse_error("schedule ranks=1 microbatches=1 backward=no rank_of_stage=0 x"),
                  "line 1, column 61: expected the end of the line, got \"x\"");
  expect_contains(parse_error("schedule ranks=1 microbatches=0 backward=no rank_of_stage=0"),
                  "at least one rank, one stage and one microbatch; got 1 ranks, 1 stages and 0");
  expect_contains(parse_error("schedule ranks=2 microbatches=1 backward=no rank_of_stage=0,2"),
                  "stage 1 of a schedule is on rank 2, expected 0 to 1");
  expect_contains(
      parse_error("schedule ranks=3 microbatches=1 backward=no rank_of_stage=0,1"),
      "a schedule has 3 ranks but only 2 stages, so some ranks have none. Use at most as "
      "many ranks as stages.");
  expect_contains(parse_error(header + "rank 0: 0F0\n"),
                  "line 3, column 1: expected the line of rank 1");
  expect_contains(parse_error(header + "rank 1: 0F0\n"),
                  "line 2, column 6: expected \"0:\", got \"1:\"");
  expect_contains(parse_error(header + "rank 0: 0F0 0Q0\n"),
                  "\"0Q0\" at line 2, column 13: position 1");
  expect_contains(parse_error(header + "rank 0:\nrank 1:\nrank 2:\n"),
                  "line 4, column 1: expected no more than 2 ranks, got \"rank\"");
}

TEST(Schedule, ParseErrorsOfNumbersThatItDoesNotHave) {
  const std::string header =
      "schedule ranks=1 microbatches=2 backward=no rank_of_stage=0,0\nrank 0: ";
  const auto error = [](const std::string& text) {
    return error_or_none([&] { parse_schedule(text); });
  };
  EXPECT_EQ(error(header + "0F0 1F0 0F1 1F1"), "");
  for (const std::string action : {"2147483647F0", "2F0", "0F2", "0SEND_F0>2", "2REDUCE"}) {
    expect_contains(error(header + action),
                    "cannot read the schedule: line 2, column 9: expected "
                    "stages from 0 to 1 and microbatches from 0 to 1, got " +
                        action);
  }
  // It would take memory for each action that there should be.
  expect_contains(
      error("schedule ranks=1 microbatches=2147483647 backward=no rank_of_stage=0,0\n"
            "rank 0: 0F0"),
      "expected a forward of 2147483647 microbatches on each of 2 stages, got 1 actions. "
      "Correct the number of microbatches, or add what is missing.");
  std::string stages = "0";
  for (int i = 0; i < 4096; ++i) stages += ",0";
  expect_contains(error("schedule ranks=1 microbatches=1 backward=no rank_of_stage=" + stages +
                        "\nrank 0: 0F0"),
                  "expected at most 4096 stages, got 4097. Use fewer stages.");
}

TEST(Schedule, AreEqualWhereAllActionsAre) {
  const auto a = lowered(interleaved, ScheduleOptions(3, 4));
  auto b = a;
  EXPECT_EQ(a, b);
  std::swap(b.actions(1)[0], b.actions(1)[1]);
  EXPECT_FALSE(a == b);
  EXPECT_FALSE(a == lowered(forward_only, ScheduleOptions(3, 4)));
}

// --- the tables of the reference ------------------------------------------------------------

TEST(Tables, Simple) {
  EXPECT_EQ(picture(simple, ScheduleOptions(2, 4)),
            "rank 0 F0 F1 F2 F3 .  .  B0 B1 B2 B3\n"
            "rank 1 .  F0 F1 F2 F3 B0 B1 B2 B3 .\n");
}

TEST(Tables, InterleavedWithTwoActive) {
  EXPECT_EQ(picture(interleaved, ScheduleOptions(2, 4).active_microbatches(2)),
            "rank 0 F0 F1 .  B0 F2 B1 F3 B2 .  B3\n"
            "rank 1 .  F0 B0 F1 B1 F2 B2 F3 B3 .\n");
}

TEST(Tables, InterleavedWithTheDefaultOfFourActive) {
  const std::string table =
      "rank 0 F0 F1 F2 B0 F3 B1 .  B2 .  B3\n"
      "rank 1 .  F0 B0 F1 B1 F2 B2 F3 B3 .\n";
  EXPECT_EQ(picture(interleaved, ScheduleOptions(2, 4).active_microbatches(4)), table);
  EXPECT_EQ(ScheduleOptions(2, 4).active_microbatches(), 4);
  EXPECT_EQ(picture(interleaved, ScheduleOptions(2, 4)), table);
}

TEST(Tables, ForwardOnly) {
  EXPECT_EQ(picture(forward_only, ScheduleOptions(3, 2)),
            "rank 0 F0 F1 .  .\n"
            "rank 1 .  F0 F1 .\n"
            "rank 2 .  .  F0 F1\n");
}

TEST(Draw, ShowsLongActionsAndSeveralStagesOfARank) {
  const auto options = ScheduleOptions(3, 1).ranks(2).rank_of_stage({0, 1, 0});
  StageCosts costs = StageCosts::unit(3);
  costs.backward = {2, 2, 2};
  const auto schedule = lowered(interleaved, options);
  EXPECT_EQ(draw(simulate(schedule, options.edges(), costs)),
            "rank 0 0F0 .   2F0 2B0 -   .   .   0B0 -\n"
            "rank 1 .   1F0 .   .   .   1B0 -   .   .\n");
  expect_contains(error_of([&] { draw(simulate(schedule, options.edges(), costs), 0); }),
                  "draw: a slot must be longer than 0, got 0.");
}

// --- every small pipeline -------------------------------------------------------------------

/// Calls `check` for 1 to 4 stages, 1 to 8 microbatches, 1 to stages + 2 active ones, and for
/// chains as well as skips between all stages.
void for_all_small(const std::function<void(const ScheduleOptions&, bool skips)>& check) {
  for (int stages = 1; stages <= 4; ++stages) {
    for (int microbatches = 1; microbatches <= 8; ++microbatches) {
      for (int active = 1; active <= stages + 2; ++active) {
        for (const bool skips : {false, true}) {
          SCOPED_TRACE(c10::str("stages ", stages, " microbatches ", microbatches, " active ",
                                active, skips ? " skips" : " chain"));
          auto options = ScheduleOptions(stages, microbatches).active_microbatches(active);
          options.edges(skips ? all_pairs(stages) : chain_edges(stages));
          check(options, skips);
        }
      }
    }
  }
}

TEST(Exhaustive, SimpleIsVerifiedAndMatchesTheFormulas) {
  for_all_small([](const ScheduleOptions& options, bool) {
    const int stages = options.stages();
    const int microbatches = options.microbatches();
    const auto schedule = lowered(simple, options);
    verify(schedule, options.edges());
    EXPECT_EQ(parse_schedule(to_string(schedule)), schedule);
    const auto run = simulate(schedule, options.edges(), StageCosts::unit(stages));
    EXPECT_EQ(run.makespan, 2 * (microbatches + stages - 1));
    EXPECT_EQ(peak_in_flight(run, stages),
              std::vector<int>(static_cast<size_t>(stages), microbatches));
    EXPECT_EQ(run.idle, std::vector<double>(static_cast<size_t>(stages), 2 * (stages - 1)));
    EXPECT_DOUBLE_EQ(run.bubble(), (stages - 1.0) / (microbatches + stages - 1.0));
  });
}

TEST(Exhaustive, ForwardOnlyIsVerifiedAndMatchesTheFormula) {
  for_all_small([](const ScheduleOptions& options, bool) {
    const auto schedule = lowered(forward_only, options);
    verify(schedule, options.edges());
    EXPECT_EQ(parse_schedule(to_string(schedule)), schedule);
    auto costs = StageCosts::unit(options.stages());
    costs.kept.assign(static_cast<size_t>(options.stages()), 1);
    const auto run = simulate(schedule, options.edges(), costs);
    EXPECT_EQ(run.makespan, options.microbatches() + options.stages() - 1);
    EXPECT_EQ(run.peak_memory, std::vector<double>(static_cast<size_t>(options.ranks()), 0));
  });
}

TEST(Exhaustive, InterleavedIsVerifiedAndMatchesTheFormulas) {
  for_all_small([](const ScheduleOptions& options, bool skips) {
    const int stages = options.stages();
    const int microbatches = options.microbatches();
    const int active = options.active_microbatches();
    const auto schedule = lowered(interleaved, options);
    const int credit = required_credit(schedule, options.edges());
    verify(schedule, options.edges(), VerifyOptions().active_microbatches(active).credit(credit));
    EXPECT_LE(credit, skips ? std::min(active, microbatches) : 1);
    EXPECT_EQ(parse_schedule(to_string(schedule)), schedule);

    const auto run = simulate(schedule, options.edges(), StageCosts::unit(stages));
    // There are as many groups of `active` microbatches as fit, one round trip each, then the rest.
    const int rounds = (microbatches - 1) / std::min(active, stages);
    const int rest = (microbatches - 1) % std::min(active, stages);
    EXPECT_EQ(run.makespan, 2 * (stages * (rounds + 1) + rest));
    if (active >= std::min(stages, microbatches)) {
      EXPECT_EQ(run.makespan, 2 * (microbatches + stages - 1));
    }
    // Until its first backward, a stage has 2 (stages - stage) - 1 slots for forwards.
    const auto peaks = peak_in_flight(run, stages);
    for (int stage = 0; stage < stages; ++stage) {
      EXPECT_EQ(peaks[static_cast<size_t>(stage)],
                std::min({microbatches, active, 2 * (stages - stage) - 1}));
    }
  });
}

TEST(Exhaustive, EveryMappingOfStagesToRanksIsVerified) {
  // Every mapping of 4 stages to 2 ranks that uses both.
  for (int bits = 1; bits < 15; ++bits) {
    std::vector<int> rank_of_stage;
    for (int stage = 0; stage < 4; ++stage) {
      rank_of_stage.push_back((bits >> stage) & 1);
    }
    for (int active = 1; active <= 6; ++active) {
      for (const auto& edges : {chain_edges(4), all_pairs(4)}) {
        SCOPED_TRACE(c10::str("mapping ", bits, " active ", active, " edges ", edges.size()));
        auto options = ScheduleOptions(4, 5).ranks(2).rank_of_stage(rank_of_stage);
        options.active_microbatches(active).edges(edges);
        const auto bounded = VerifyOptions().active_microbatches(active).credit(5);
        verify(lowered(interleaved, options), edges, bounded);
        verify(lowered(simple, options), edges, VerifyOptions().credit(5));
        verify(lowered(forward_only, options), edges, VerifyOptions().credit(5));
      }
    }
  }
}

TEST(Exhaustive, EdgesWithoutGradientCarryNothingBack) {
  const std::vector<StageEdge> edges = {{0, 1, true}, {0, 2, false}, {1, 2, true}};
  auto options = ScheduleOptions(3, 4).edges(edges);
  const auto schedule = lowered(interleaved, options);
  verify(schedule, edges);
  const auto text = to_string(schedule);
  expect_contains(text, "0SEND_F0>2");
  EXPECT_EQ(text.find("2SEND_B0>0"), std::string::npos);
}

// --- the simulator --------------------------------------------------------------------------

TEST(Simulate, UnequalStagesMatchTheFormulaOfGPipe) {
  // T = sum of all stages' times + (M - 1) times that of the slowest, with B proportional to F.
  StageCosts costs;
  costs.forward = {1, 3, 2};
  costs.backward = {2, 6, 4};
  const ScheduleOptions options(3, 5);
  const auto run = simulate(lowered(simple, options), options.edges(), costs);
  EXPECT_DOUBLE_EQ(run.makespan, (3 + 9 + 6) + 4 * 9);
  EXPECT_EQ(run.busy, (std::vector<double>{15, 45, 30}));
  EXPECT_EQ(run.idle,
            (std::vector<double>{run.makespan - 15, run.makespan - 45, run.makespan - 30}));
}

TEST(Simulate, LatencyMatchesTheFormulaOfGPipe) {
  // Idle = (p - 1) (F + B + 2c), whatever the number of microbatches.
  for (const int microbatches : {1, 4, 16}) {
    auto costs = StageCosts::unit(4);
    costs.backward = {2, 2, 2, 2};
    costs.latency = {0.25, 0.25, 0.25};
    const ScheduleOptions options(4, microbatches);
    const auto run = simulate(lowered(simple, options), options.edges(), costs);
    EXPECT_DOUBLE_EQ(run.idle[0], 3 * (1 + 2 + 2 * 0.25));
  }
}

TEST(Simulate, TimesEveryAction) {
  const auto schedule = from_lines(
      {"0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE"}, 1);
  auto costs = StageCosts::unit(2);
  costs.latency = {0.5};
  const auto run = simulate(schedule, chain_edges(2), costs);
  std::vector<double> starts;
  std::vector<double> ends;
  for (const auto& timed : run.timeline[0]) {
    starts.push_back(timed.start);
    ends.push_back(timed.end);
  }
  EXPECT_EQ(starts, (std::vector<double>{0, 1, 1, 4, 5}));
  EXPECT_EQ(ends, (std::vector<double>{1, 1, 4, 5, 5}));
}

TEST(Simulate, RefusesCostsThatDoNotFit) {
  const ScheduleOptions options(2, 1);
  const auto schedule = lowered(simple, options);
  const auto simulate_error = [&](const StageCosts& costs) {
    return error_of([&] { simulate(schedule, options.edges(), costs); });
  };
  expect_contains(simulate_error(StageCosts::unit(3)),
                  "expected 2 numbers in costs.forward, got 3");
  auto costs = StageCosts::unit(2);
  costs.latency = {1, 1};
  expect_contains(simulate_error(costs), "expected 1 numbers in costs.latency, got 2");
  costs.latency = {-1};
  expect_contains(simulate_error(costs), "costs.latency must be finite and not negative, got -1");
}

// --- options --------------------------------------------------------------------------------

/// The actions of one stage that is alone, one after the other.
Simulation run_alone(const std::string& actions, int microbatches, const StageCosts& costs) {
  return simulate(from_lines({actions}, microbatches), {}, costs);
}

TEST(Simulate, AddsTheHalvesOfBackwards) {
  const auto costs = StageCosts::uniform(1, 1, 2, 3);
  EXPECT_EQ(run_alone("0F0 0B0 0REDUCE", 1, costs).makespan, 6);
  EXPECT_EQ(run_alone("0F0 0I0 0W0 0REDUCE", 1, costs).makespan, 6);
  auto whole = costs;
  whole.backward = {4};
  EXPECT_EQ(run_alone("0F0 0B0 0REDUCE", 1, whole).makespan, 5);
  EXPECT_EQ(run_alone("0F0 0I0 0W0 0REDUCE", 1, whole).makespan, 6);
  whole.backward_input.clear();
  whole.backward_weight.clear();
  expect_contains(error_of([&] { run_alone("0F0 0I0 0W0 0REDUCE", 1, whole); }),
                  "the schedule splits backwards, but costs.backward_input and "
                  "costs.backward_weight are empty. Give the times of both halves.");
}

TEST(Simulate, KeepsActivationsUntilTheLastHalfThatUsesThem) {
  auto costs = StageCosts::uniform(1);
  costs.kept = {5};
  const std::string split = "0F0 0F1 0I0 0I1 0W0 0F2 0W1 0B2 0REDUCE";
  // Nothing is released before W.
  auto run = run_alone(split, 3, costs);
  EXPECT_EQ(run.peak_memory, (std::vector<double>{10}));
  // Three are in flight, of which two keep a part only.
  costs.kept_for_weights = {2};
  run = run_alone("0F0 0F1 0I0 0I1 0F2 0W0 0W1 0B2 0REDUCE", 3, costs);
  EXPECT_EQ(run.peak_memory, (std::vector<double>{10}));
  std::vector<double> memory;
  for (const auto& timed : run.timeline[0]) {
    memory.push_back(timed.memory);
  }
  EXPECT_EQ(memory, (std::vector<double>{5, 10, 7, 4, 9, 7, 5, 0, 0}));
}

TEST(Simulate, TakesTransfersInBothDirectionsAndSends) {
  const ScheduleOptions options(2, 1);
  auto costs = StageCosts::uniform(2);
  const auto makespan = [&] {
    return simulate(lowered(simple, options), options.edges(), costs).makespan;
  };
  EXPECT_EQ(makespan(), 6);
  costs.latency = {0.5};
  EXPECT_EQ(makespan(), 7);
  costs.backward_latency = {2};
  EXPECT_EQ(makespan(), 8.5);
  costs.send = {0.25};
  EXPECT_EQ(makespan(), 9);
  const auto run = simulate(lowered(simple, options), options.edges(), costs);
  EXPECT_EQ(run.busy, (std::vector<double>{3.25, 3.25}));
  EXPECT_EQ(spans_of(run), (std::vector<double>{9, 3}));
}

TEST(Draw, ShowsTheHalvesOfBackwards) {
  EXPECT_EQ(picture(zero_bubble_h1, ScheduleOptions(2, 3)),
            "rank 0 F0 F1 .  I0 W0 F2 I1 W1 I2 W2\n"
            "rank 1 .  F0 I0 F1 I1 W0 F2 I2 W1 W2\n");
}

TEST(Options, ErrorsNameTheOption) {
  const auto option_error = [](const ScheduleOptions& options) {
    return error_of([&] { make_schedule("interleaved", options); });
  };
  expect_contains(option_error(ScheduleOptions(0, 1)), "option stages: expected at least 1, got 0");
  expect_contains(option_error(ScheduleOptions(1, 0)),
                  "option microbatches: expected at least 1, got 0");
  expect_contains(option_error(ScheduleOptions(1, 1).active_microbatches(0)),
                  "option active_microbatches: expected at least 1, got 0");
  expect_contains(option_error(ScheduleOptions(2, 1).rank_of_stage({0})),
                  "rank_of_stage: expected one rank for each of 2 stages, got 1");
  expect_contains(option_error(ScheduleOptions(2, 1).edges({{1, 0}})),
                  "edge from a stage to a later one of 0 to 1, got 1 -> 0");
  expect_contains(option_error(ScheduleOptions(2, 1).edges({{0, 1}, {0, 1}})),
                  "0 -> 1 appears twice. Give one edge for all values from one stage to another.");
}

TEST(Lower, RefusesWhatIsLoweredAlready) {
  const auto schedule = lowered(simple, ScheduleOptions(2, 1));
  expect_contains(error_of([&] { lower(schedule, chain_edges(2)); }),
                  "rank 0 has 0SEND_F0>1; expected only forwards and backwards");
}

// --- size -----------------------------------------------------------------------------------

TEST(Size, SixtyFourRanksAndFiveHundredMicrobatches) {
  for (const auto generator : {simple, interleaved}) {
    const ScheduleOptions options(64, 512);
    const auto schedule = lowered(generator, options);
    verify(schedule, options.edges());
    const auto run = simulate(schedule, options.edges(), StageCosts::unit(64));
    EXPECT_EQ(run.makespan, 2 * (512 + 64 - 1));
  }
}

}  // namespace
}  // namespace smp::pipeline
