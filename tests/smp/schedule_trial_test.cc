// SPDX-License-Identifier: Apache-2.0
// Which schedules "auto" tries, and which one it keeps: without ranks, on steps made of known
// costs.

#include "runtime/step/schedule_trial.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "pipeline/measured_costs.h"
#include "pipeline/simulator.h"
#include "runtime/step/units.h"

namespace smp::runtime {
namespace {

using pipeline::RankedSchedule;
using pipeline::ScheduleOptions;
using pipeline::StageCosts;
using pipeline::StepTimeline;
using pipeline::Timeline;

ScheduleOptions options_for(int ranks, int microbatches, const StageCosts& costs) {
  return ScheduleOptions(ranks, microbatches).costs(costs);
}

RankedSchedule best(const ScheduleOptions& options) {
  return pipeline::rank_schedules(options).best();
}

RankedSchedule named(const std::string& name, const ScheduleOptions& options) {
  const auto schedule = pipeline::lower(pipeline::make_schedule(name, options), options.edges());
  return {name, schedule, pipeline::simulate(schedule, options.edges(), options.costs())};
}

/// Three steps of the trial's schedule as they would go if stages took the times of `truth`, the
/// second one `pace` times as long and the others longer and shorter than that.
Timeline recorded(const ScheduleTrial& trial, const ScheduleOptions& options,
                  const StageCosts& truth, double pace = 1) {
  Timeline timeline;
  const auto& schedule = trial.current().schedule;
  const auto step =
      pipeline::predicted_timeline(pipeline::simulate(schedule, options.edges(), truth));
  int number = 4;
  for (const double part : {0.5, 1.0, 1.5}) {
    StepTimeline scaled = step;
    scaled.name = "step " + std::to_string(number++);
    scaled.makespan *= part * pace;
    timeline.measured.push_back(scaled);
  }
  return timeline;
}

/// Runs the trial to its end; `last_pace` is that of its last part.
void run(ScheduleTrial& trial, const ScheduleOptions& options, const StageCosts& truth,
         double last_pace = 1) {
  for (const double pace : {1.0, 1.0, last_pace}) {
    ASSERT_FALSE(trial.is_over());
    trial.learn(recorded(trial, options, truth, pace));
  }
  EXPECT_TRUE(trial.is_over());
}

bool splits(const pipeline::Schedule& schedule) {
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const auto& action : schedule.actions(rank)) {
      if (action.kind == pipeline::Action::Kind::kBackwardInput) return true;
    }
  }
  return false;
}

/// Halves as the partitioner guesses them, and the cost of a split if both have to compute much
/// twice.
StageCosts cheap_split(int stages = 4) {
  auto costs = StageCosts::uniform(stages, 100, 100, 100);
  costs.kept.assign(static_cast<size_t>(stages), 1);
  return costs;
}
StageCosts dear_split(int stages = 4) {
  auto costs = cheap_split(stages);
  costs.backward = std::vector<double>(static_cast<size_t>(stages), 200);
  costs.backward_input = costs.backward_weight = std::vector<double>(costs.backward.size(), 180);
  return costs;
}

TEST(ScheduleTrial, RunsThePredictedScheduleThenItsExchangeThenTheBest) {
  const auto options = options_for(4, 8, cheap_split());
  ScheduleTrial trial(options, best(options));
  EXPECT_EQ(trial.current().name, "zb_h1");
  EXPECT_TRUE(splits(trial.current().schedule));
  trial.learn(recorded(trial, options, dear_split()));
  EXPECT_EQ(trial.current().name, "zb_h1 with its backwards exchanged");
  EXPECT_FALSE(splits(trial.current().schedule));
  trial.learn(recorded(trial, options, dear_split()));
  const auto expected = best(options_for(4, 8, dear_split()));
  EXPECT_EQ(trial.current().schedule, expected.schedule);
  EXPECT_EQ(trial.current().name, expected.name);
  EXPECT_DOUBLE_EQ(trial.current().simulation.makespan, expected.simulation.makespan);
  EXPECT_FALSE(trial.is_over());
  trial.learn(recorded(trial, options, dear_split()));
  EXPECT_TRUE(trial.is_over());
  EXPECT_EQ(trial.current().schedule, expected.schedule);
}

TEST(ScheduleTrial, StaysWhereThePredictionWasRight) {
  const auto options = options_for(4, 8, cheap_split());
  ScheduleTrial trial(options, best(options));
  run(trial, options, cheap_split());
  EXPECT_EQ(trial.current().schedule, best(options).schedule);
}

TEST(ScheduleTrial, AChangeMustBeWorthIt) {
  // A step of 1f1b is idle for 2 units more than zb_h1 has to be, if F = I = W.
  for (const int microbatches : {10, 200}) {
    const auto options = options_for(2, microbatches, cheap_split(2));
    ScheduleTrial trial(options, named("1f1b", options));
    run(trial, options, options.costs());
    EXPECT_EQ(trial.current().name, microbatches == 10 ? "zb_h1" : "1f1b");
  }
}

TEST(ScheduleTrial, ReturnsWhereTheChangeWasWrong) {
  const auto options = options_for(4, 8, cheap_split());
  const auto first = best(options);
  ScheduleTrial trial(options, first);
  run(trial, options, dear_split(), /*last_pace=*/1.5);
  EXPECT_EQ(trial.current().name, "zb_h1");
  EXPECT_EQ(trial.current().schedule, first.schedule);
  EXPECT_NE(trial.report().find("\"auto\" tried \"1f1b\" and returns to \"zb_h1\": a step takes "),
            std::string::npos)
      << trial.report();
}

TEST(ScheduleTrial, KeepsTheMemoryLimitInEveryPart) {
  const auto options = options_for(4, 8, cheap_split()).memory_limit({4, 4, 4, 4});
  auto truth = cheap_split();
  truth.latency = {150, 150, 150};
  ScheduleTrial trial(options, best(options));
  while (!trial.is_over()) {
    for (const double kept : trial.current().simulation.peak_memory) EXPECT_LE(kept, 4);
    trial.learn(recorded(trial, options, truth));
  }
  for (const double kept : trial.current().simulation.peak_memory) EXPECT_LE(kept, 4);
  // Without the limit another one would be the best.
  EXPECT_GT(trial.current().simulation.makespan,
            best(options_for(4, 8, truth)).simulation.makespan);
}

TEST(ScheduleTrial, SaysWhatItFound) {
  const auto options = options_for(2, 4, cheap_split(2));
  ScheduleTrial trial(options, named("zb_h1", options));
  run(trial, options, dear_split(2), /*last_pace=*/1.01);
  const std::string report = trial.report();
  // Between these come the schedules that do not fit the placement.
  const auto refused = report.find("not zbv"), verdict = report.find("\"pipeline\"");
  EXPECT_EQ(report.substr(0, refused),
            "Schedules by measured costs (us):\n"
            "schedule          makespan  idle      most kept\n"
            "1f1b              1500      20 %      2\n"
            "interleaved       1500      20 %      3\n"
            "eager_1f1b        1500      20 %      3\n"
            "interleaved_1f1b  1500      20 %      3\n"
            "simple            1500      20 %      4\n"
            "breadth_first     1500      20 %      4\n"
            "list              1500      20 %      4\n"
            "zb_h2             1940      5.155 %   3\n"
            "zb_h1             2020      8.911 %   2\n"
            "idle by rank under 1f1b: 300 300\n");
  EXPECT_EQ(
      report.substr(verdict),
      "\"pipeline\": \"auto\" changes from \"zb_h1\" to \"1f1b\": a step takes 1.51 ms with it "
      "and 2.02 ms with \"zb_h1\".\n"
      "step 5: 1.51 ms, 20.8% idle; predicted: 1.5 ms, 20.0% idle (measured +1.0%)\n"
      "\n"
      "  rank   idle  predicted  forward  backward   wait  other  kept at most\n"
      "  ----  -----  ---------  -------  --------  -----  -----  ------------\n"
      "     0  20.8%      20.0%    26.4%     52.8%  19.8%   1.0%           2 B\n"
      "     1  20.8%      20.0%    26.4%     52.8%   6.6%  14.2%           1 B\n");
}

/// Costs of units, two for each stage, that take half of its time each.
StageCosts unit_costs(StageCosts stages) {
  StageCosts units;
  for (auto list : {&StageCosts::forward, &StageCosts::backward, &StageCosts::backward_input,
                    &StageCosts::backward_weight, &StageCosts::kept}) {
    for (const double cost : stages.*list) (units.*list).insert((units.*list).end(), 2, cost / 2);
  }
  return units;
}

/// Stages run unit by unit, and the schedules tried are those of stages all the while.
TEST(ScheduleTrial, FindsTheBestByRecordsOfUnits) {
  const auto options = options_for(4, 8, cheap_split());
  const StepUnits units{{0, 0, 1, 1, 2, 2, 3, 3},
                        std::vector<bool>(8, true),
                        std::vector<pipeline::StageReads>(8, {5, 5}),
                        /*live=*/10,
                        pipeline::chain_edges(8),
                        unit_costs(dear_split())};
  const auto best_by_truth = best(options_for(4, 8, dear_split()));
  ScheduleTrial trial(options, best(options));
  for (const auto& expected :
       {best(options).schedule, pipeline::exchange_backwards(best(options).schedule, options),
        best_by_truth.schedule}) {
    ASSERT_FALSE(trial.is_over());
    EXPECT_EQ(trial.current().schedule, expected);
    const RankedSchedule running = schedule_of_units(trial.current(), units);
    EXPECT_EQ(running.name, trial.current().name);
    EXPECT_EQ(running.schedule.stages(), 8);
    Timeline timeline;
    timeline.measured.push_back(pipeline::predicted_timeline(running.simulation));
    trial.learn(pipeline::timeline_of_stages(timeline, units.stage_of_unit));
  }
  EXPECT_TRUE(trial.is_over());
  EXPECT_EQ(trial.current().schedule, best_by_truth.schedule);
  EXPECT_EQ(trial.current().name, "1f1b");
  EXPECT_DOUBLE_EQ(trial.current().simulation.makespan, best_by_truth.simulation.makespan);
  const std::string report = trial.report();
  for (const char* part :
       {"Schedules by measured costs (us):\n", "\"auto\" changes from \"zb_h1\" to \"1f1b\": ",
        "rank   idle  predicted  forward  backward"}) {
    EXPECT_NE(report.find(part), std::string::npos) << report;
  }
}

TEST(ScheduleTrial, SaysThatItStays) {
  const auto options = options_for(2, 4, cheap_split(2));
  ScheduleTrial trial(options, best(options));
  run(trial, options, options.costs());
  EXPECT_NE(trial.report().find("\n\"pipeline\": \"auto\" stays with \"zb_h1\": by these costs no "
                                "schedule is faster by more than 2 %.\n"),
            std::string::npos)
      << trial.report();
}

}  // namespace
}  // namespace smp::runtime
