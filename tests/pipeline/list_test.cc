// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "pipeline/generators.h"
#include "pipeline/ranking.h"
#include "pipeline/simulator.h"
#include "pipeline/verifier.h"
#include "tests/pipeline/schedule_helpers.h"

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;

// --- the best of all orders, by trying them all ---------------------------------------------

/// Every order of the computes of one stage, backwards split, that the rules allow.
class AllOrders {
 public:
  AllOrders(int stage, int microbatches) : stage_(stage), microbatches_(microbatches) { extend(); }

  const std::vector<std::vector<Action>>& get() const { return orders_; }

 private:
  void extend() {
    if (weights_ == microbatches_) {
      orders_.push_back(order_);
      return;
    }
    if (forwards_ < microbatches_) next(forward_of(stage_, forwards_), forwards_);
    if (inputs_ < forwards_) next(backward_input_of(stage_, inputs_), inputs_);
    if (weights_ < inputs_) next(backward_weight_of(stage_, weights_), weights_);
  }

  void next(const Action& action, int& count) {
    order_.push_back(action);
    ++count;
    extend();
    --count;
    order_.pop_back();
  }

  int stage_;
  int microbatches_;
  int forwards_ = 0;
  int inputs_ = 0;
  int weights_ = 0;
  std::vector<Action> order_;
  std::vector<std::vector<Action>> orders_;
};

double peak_of(const std::vector<Action>& order, const StageCosts& costs) {
  double kept = 0;
  double peak = 0;
  for (const auto& action : order) {
    const auto stage = static_cast<size_t>(action.stage);
    if (action.kind == Kind::kForward) kept += costs.kept[stage];
    if (action.kind == Kind::kBackwardInput) {
      kept -= costs.kept[stage] - costs.kept_for_weights[stage];
    }
    if (action.kind == Kind::kBackwardWeight) kept -= costs.kept_for_weights[stage];
    peak = std::max(peak, kept);
  }
  return peak;
}

/// One stage on each rank, connected as a chain: the time of an order by its recursion. It is asked
/// for millions of orders, and so allocates nothing.
double makespan_of(const std::vector<const std::vector<Action>*>& orders, const StageCosts& costs) {
  constexpr size_t kMostStages = 3, kMostMicrobatches = 4;
  constexpr double kUnknown = -1;
  const size_t stages = orders.size();
  double forwards[kMostStages][kMostMicrobatches], inputs[kMostStages][kMostMicrobatches];
  std::fill_n(&forwards[0][0], kMostStages * kMostMicrobatches, kUnknown);
  std::fill_n(&inputs[0][0], kMostStages * kMostMicrobatches, kUnknown);
  std::array<size_t, kMostStages> positions{};
  std::array<double, kMostStages> clocks{};
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t s = 0; s < stages; ++s) {
      for (; positions[s] < orders[s]->size(); ++positions[s], progress = true) {
        const auto& action = (*orders[s])[positions[s]];
        const auto m = static_cast<size_t>(action.microbatch);
        double start = clocks[s];
        double cost = costs.backward_weight[s];
        if (action.kind == Kind::kForward) {
          cost = costs.forward[s];
          if (s > 0) {
            if (forwards[s - 1][m] == kUnknown) break;
            start = std::max(start, forwards[s - 1][m] + costs.latency[s - 1]);
          }
          forwards[s][m] = start + cost;
        } else if (action.kind == Kind::kBackwardInput) {
          cost = costs.backward_input[s];
          if (s + 1 < stages) {
            if (inputs[s + 1][m] == kUnknown) break;
            start = std::max(start, inputs[s + 1][m] + costs.backward_latency[s]);
          }
          inputs[s][m] = start + cost;
        }
        clocks[s] = start + cost;
      }
    }
  }
  for (size_t s = 0; s < stages; ++s) {
    if (positions[s] < orders[s]->size()) return std::numeric_limits<double>::infinity();
  }
  return *std::max_element(clocks.begin(), clocks.end());
}

/// The least makespan within the memory limit.
double brute_force(const ScheduleOptions& options) {
  const auto costs =
      options.costs().filled(static_cast<size_t>(options.stages()), options.edges().size());
  std::vector<std::vector<std::vector<Action>>> orders;
  for (int stage = 0; stage < options.stages(); ++stage) {
    orders.emplace_back();
    const AllOrders all(stage, options.microbatches());
    for (const auto& order : all.get()) {
      const bool fits = options.memory_limit().empty() ||
                        peak_of(order, costs) <= options.memory_limit()[orders.size() - 1];
      if (fits) orders.back().push_back(order);
    }
  }
  double best = std::numeric_limits<double>::infinity();
  std::vector<size_t> chosen(orders.size(), 0);
  std::vector<const std::vector<Action>*> tried(orders.size());
  for (;;) {
    for (size_t s = 0; s < orders.size(); ++s) tried[s] = &orders[s][chosen[s]];
    best = std::min(best, makespan_of(tried, costs));
    size_t s = 0;
    while (s < orders.size() && ++chosen[s] == orders[s].size()) chosen[s++] = 0;
    if (s == orders.size()) return best;
  }
}

Simulation run(const ScheduleOptions& options) {
  const auto schedule = lowered(list_schedule, options);
  verify(schedule, options.edges(), VerifyOptions().credit(options.microbatches()));
  return simulate(schedule, options.edges(), options.costs());
}

/// Whole numbers, so that sums are exact.
StageCosts random_costs(int stages, std::mt19937& random) {
  const auto draw = [&](int least, int most) {
    return static_cast<double>(std::uniform_int_distribution<int>(least, most)(random));
  };
  StageCosts costs;
  for (int stage = 0; stage < stages; ++stage) {
    costs.forward.push_back(draw(1, 6));
    costs.backward_input.push_back(draw(1, 6));
    costs.backward_weight.push_back(draw(1, 6));
    costs.kept.push_back(draw(2, 4));
    costs.kept_for_weights.push_back(draw(0, 2));
    if (stage > 0) {
      costs.latency.push_back(draw(0, 3));
      costs.backward_latency.push_back(draw(0, 3));
    }
  }
  return costs;
}

// No proof: a search that found the optimum in all of these.
TEST(List, FindsTheBestOrderOfTinyPipelines) {
  std::mt19937 random(2026);
  for (const auto& [stages, microbatches] : {std::pair(2, 2), {2, 3}, {2, 4}, {3, 2}, {3, 3}}) {
    for (int trial = 0; trial < 12; ++trial) {
      auto options = ScheduleOptions(stages, microbatches);
      if (trial > 0) options.costs(random_costs(stages, random));
      if (trial % 2 == 1) {
        const int room = std::uniform_int_distribution<int>(4, 9)(random);
        options.memory_limit(std::vector<double>(static_cast<size_t>(stages), room));
      }
      EXPECT_EQ(run(options).makespan, brute_force(options))
          << stages << " stages, " << microbatches << " microbatches, trial " << trial;
    }
  }
}

// --- beside the closed forms ------------------------------------------------------------------

std::vector<ScheduleOptions> pipelines() {
  std::vector<ScheduleOptions> result;
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (const int microbatches : {1, 2, 5, 8}) {
      result.push_back(ScheduleOptions::looped(ranks, 1, microbatches));
      result.push_back(ScheduleOptions::looped(ranks, 2, microbatches));
      result.push_back(ScheduleOptions::v_shaped(ranks, microbatches));
    }
  }
  // A stage that is visited twice, and values that skip stages.
  result.push_back(ScheduleOptions(3, 6).ranks(2).rank_of_stage({0, 1, 0}));
  result.push_back(ScheduleOptions(4, 6).edges(all_pairs(4)));
  return result;
}

/// The room of one rank for `microbatches`.
std::vector<double> room_for(const ScheduleOptions& options, double microbatches) {
  std::vector<double> limit(static_cast<size_t>(options.ranks()), 0);
  for (int stage = 0; stage < options.stages(); ++stage) {
    const auto index = static_cast<size_t>(stage);
    limit[static_cast<size_t>(options.rank_of_stage()[index])] +=
        microbatches * options.costs().kept[index];
  }
  return limit;
}

StageCosts costs_for(const ScheduleOptions& options, std::mt19937& random) {
  auto costs = random_costs(options.stages(), random);
  costs.latency.assign(options.edges().size(), 1);
  costs.backward_latency.assign(options.edges().size(), 2);
  return costs;
}

TEST(List, IsNeverWorseThanTheOthersWithinTheSameMemory) {
  std::mt19937 random(5);
  for (auto options : pipelines()) {
    options.costs(costs_for(options, random));
    for (const double microbatches : {1.0, 2.5, 100.0}) {
      SCOPED_TRACE(c10::str(options.stages(), " stages on ", options.ranks(), " ranks, ",
                            options.microbatches(), " microbatches, room for ", microbatches));
      options.memory_limit(room_for(options, microbatches));
      const auto ranking = rank_schedules(options);
      const auto list = std::find_if(ranking.schedules.begin(), ranking.schedules.end(),
                                     [](const auto& ranked) { return ranked.name == "list"; });
      ASSERT_NE(list, ranking.schedules.end());
      for (const auto& [name, schedule, simulation] : ranking.schedules) {
        verify(schedule, options.edges(), VerifyOptions().credit(options.microbatches()));
        EXPECT_LE(list->simulation.makespan, simulation.makespan) << name;
        for (size_t rank = 0; rank < simulation.peak_memory.size(); ++rank) {
          EXPECT_LE(simulation.peak_memory[rank], options.memory_limit()[rank]) << name;
        }
      }
    }
  }
}

TEST(List, ReachesTheLimitOfTheMachineWhereMemoryAllows) {
  // No order can take less than the work of a rank and the way of the first values to the last one.
  for (const auto& options : {ScheduleOptions(4, 8), ScheduleOptions::looped(4, 2, 8),
                              ScheduleOptions::v_shaped(4, 4), ScheduleOptions::looped(2, 4, 3)}) {
    const int work = 3 * options.microbatches() * options.stages() / options.ranks();
    EXPECT_EQ(run(options).makespan, work + options.ranks() - 1);
  }
}

TEST(List, SplitsOnlyWhereItHelps) {
  // One rank never waits, so halves would be actions for nothing.
  EXPECT_EQ(to_string(list_schedule(ScheduleOptions::looped(1, 2, 3))).find('W'),
            std::string::npos);
  // And it cannot where the time of the halves is not known.
  auto options = ScheduleOptions(3, 4);
  StageCosts costs;
  costs.forward = {1, 1, 1};
  costs.backward = {2, 2, 2};
  options.costs(costs);
  EXPECT_EQ(to_string(list_schedule(options)).find('W'), std::string::npos);
  EXPECT_EQ(run(options).makespan, 3 * (4 + 3 - 1));
}

TEST(List, CountsWhatSplittingCosts) {
  // A whole backward takes less than its halves: then splitting must save more than that.
  auto options = ScheduleOptions(2, 8);
  auto costs = StageCosts::uniform(2);
  costs.backward = {1.5, 1.5};
  options.costs(costs);
  const auto schedule = lowered(list_schedule, options);
  const auto simulation = simulate(schedule, options.edges(), costs);
  EXPECT_LE(simulation.makespan,
            simulate(lowered(one_forward_one_backward, options), options.edges(), costs).makespan);
  // Only where a gradient is waited for, not in each microbatch.
  EXPECT_LT(simulation.busy[0] + simulation.busy[1], 2 * 8 * (1 + 1.75));
}

TEST(List, TakesStagesThatCostNothing) {
  auto options = ScheduleOptions(3, 4);
  for (const auto& forward : {std::vector<double>{1, 0, 0}, {0, 0, 1}, {0, 0, 0}}) {
    auto costs = StageCosts::uniform(3, 0, 0, 0);
    costs.forward = forward;
    options.costs(costs);
    EXPECT_EQ(run(options).makespan, 4 * (forward[0] + forward[2]));
  }
}

TEST(List, IsTheSameEveryTime) {
  std::mt19937 random(7);
  auto options = ScheduleOptions(4, 8);
  options.costs(costs_for(options, random));
  EXPECT_EQ(list_schedule(options), list_schedule(options));
}

TEST(List, ErrorsNameTheLimit) {
  auto options = ScheduleOptions::looped(2, 2, 4);
  auto costs = StageCosts::uniform(4);
  costs.kept = {1, 2, 3, 4};
  options.costs(costs);
  const auto error = [&](const std::vector<double>& limit) {
    options.memory_limit(limit);
    return error_or_none([&] { list_schedule(options); });
  };
  EXPECT_EQ(error({4, 6}), "");
  expect_contains(error({4}),
                  "schedule option memory_limit: expected one number for each of 2 ranks, got 1.");
  expect_contains(error({4, 5}),
                  "schedule option memory_limit: rank 1 may keep 5, but one microbatch needs 6 "
                  "there. Use more microbatches or partitions, or raise the limit.");
}

/// One half that needs more than a whole backward leaves whole ones.
TEST(List, RunsWholeBackwardsWhereHalvesNeedMoreThanTheLimit) {
  for (const double gradients : {0, 1, 3}) {
    for (const double for_weights : {4, 5, 7}) {
      auto options = ScheduleOptions(2, 3);
      auto costs = StageCosts::uniform(2);
      costs.kept = {5, 5};
      costs.kept_for_weights = {for_weights, for_weights};
      costs.gradients_for_weights = {gradients, gradients};
      options.costs(costs).memory_limit({5, 5});
      SCOPED_TRACE(c10::str(gradients, " beside it, ", for_weights, " between halves"));
      EXPECT_EQ(run(options).peak_memory, (std::vector<double>{5, 5}));
      const auto ranking = rank_schedules(options);
      EXPECT_EQ(ranking.schedules.size(), 1U) << to_string(ranking);
    }
  }
}

// --- the ranking ------------------------------------------------------------------------------

TEST(Ranking, PutsTheShortestStepFirstAndSaysWhatIsRefused) {
  auto options = ScheduleOptions(4, 8);
  auto costs = StageCosts::uniform(4);
  costs.kept = {1, 1, 1, 1};
  options.costs(costs).memory_limit({4, 4, 4, 4});
  const auto ranking = rank_schedules(options);
  EXPECT_EQ(ranking.best().name, "zb_h1");
  EXPECT_EQ(to_string(ranking),
            "schedule          makespan  idle      most kept\n"
            "zb_h1             27        11.11 %   4\n"
            "list              27        11.11 %   4\n"
            "1f1b              33        27.27 %   4\n"
            "idle by rank under zb_h1: 3 3 3 3\n"
            "not simple: rank 0 would keep 8, more than its limit of 4.\n"
            "not interleaved: rank 0 would keep 6, more than its limit of 4.\n"
            "not eager_1f1b: rank 0 would keep 7, more than its limit of 4.\n"
            "not interleaved_1f1b: rank 0 would keep 7, more than its limit of 4.\n"
            "not breadth_first: rank 0 would keep 8, more than its limit of 4.\n"
            "not zb_h2: rank 0 would keep 7, more than its limit of 4.\n"
            "not zbv: \"zbv\" expects two stages on each rank, the second ones in reverse, as "
            "0,1,1,0 with 2 ranks, got 0,1,2,3. Place the stages so, or use one of these: simple, "
            "interleaved, 1f1b, eager_1f1b, interleaved_1f1b, breadth_first, zb_h1, zb_h2, list.\n"
            "not dualpipe_v: \"dualpipe_v\" expects two stages on each rank, the second ones in "
            "reverse, as 0,1,1,0 with 2 ranks, got 0,1,2,3. Place the stages so, or use one of "
            "these: simple, interleaved, 1f1b, eager_1f1b, interleaved_1f1b, breadth_first, zb_h1, "
            "zb_h2, list.\n");
}

TEST(Ranking, ChoosesWhatKeepsLeastOfThoseThatAreAsGoodAsTheBest) {
  const auto schedule = make_schedule("1f1b", ScheduleOptions(2, 4));
  ScheduleRanking ranking;
  const auto add = [&](const std::string& name, double makespan, std::vector<double> kept) {
    Simulation simulation;
    simulation.makespan = makespan;
    simulation.peak_memory = std::move(kept);
    ranking.schedules.push_back({name, schedule, simulation});
  };
  add("best", 1000, {9, 2});
  EXPECT_EQ(ranking.choice().name, "best");
  add("alike", 1019, {5, 5});
  add("as much", 1020, {2, 5});
  add("too long", 1021, {1, 1});
  EXPECT_EQ(ranking.choice().name, "alike");
  EXPECT_EQ(ranking.best().name, "best");
}

TEST(Ranking, DependsOnTheTimeOfTransfers) {
  // 1F1B waits for each round trip, more microbatches in flight do not.
  auto options = ScheduleOptions(4, 16);
  StageCosts costs;
  costs.forward = {1, 1, 1, 1};
  costs.backward = {2, 2, 2, 2};
  costs.latency = {1, 1, 1};
  options.costs(costs);
  const auto ranking = rank_schedules(options);
  const auto place = [&](const std::string& name) {
    return std::find_if(ranking.schedules.begin(), ranking.schedules.end(),
                        [&](const auto& ranked) { return ranked.name == name; }) -
           ranking.schedules.begin();
  };
  EXPECT_LT(place("eager_1f1b"), place("1f1b"));
  expect_contains(to_string(ranking),
                  "not zb_h1: it splits backwards, and the time of their halves is not known.");
}

TEST(Ranking, MakesAListOnlyIfNothingElseFitsWhereAskedTo) {
  auto options = ScheduleOptions(2, 4);
  auto costs = StageCosts::uniform(2);
  costs.kept = {1, 1};
  options.costs(costs);
  const auto names = [&] {
    std::vector<std::string> result;
    for (const auto& ranked : rank_schedules(options, ListSearch::kIfNothingElseFits).schedules) {
      result.push_back(ranked.name);
    }
    return result;
  };
  const auto all = names();
  EXPECT_EQ(all.front(), "zb_h1");
  EXPECT_EQ(std::count(all.begin(), all.end(), "list"), 0);
  options.memory_limit({1, 1});
  EXPECT_EQ(names(), std::vector<std::string>{"list"});
}

TEST(Ranking, SumsMayExceedALimitByRounding) {
  auto costs = StageCosts::uniform(4);
  costs.kept.assign(4, 0.1);
  auto options = ScheduleOptions(4, 8).costs(costs).memory_limit(std::vector<double>(4, 0.3));
  const auto ranking = rank_schedules(options);
  EXPECT_EQ(ranking.best().name, "list");
  EXPECT_EQ(ranking.best().simulation.peak_memory[0], 0.1 + 0.1 + 0.1);
  EXPECT_GT(0.1 + 0.1 + 0.1, 0.3);
  costs.kept.assign(4, 0.1 + 0.1 + 0.1);
  EXPECT_EQ(rank_schedules(options.costs(costs)).best().name, "list");
}

TEST(Ranking, IsRefusedWhereNothingFits) {
  auto options = ScheduleOptions(2, 4);
  auto costs = StageCosts::uniform(2);
  costs.kept = {12'345'678'901, 12'345'678'901};
  options.costs(costs).memory_limit({12'345'678'901, 12'345'670'000});
  expect_contains(error_of([&] { rank_schedules(options); }),
                  "rank 1 may keep 12345670000, but one microbatch needs 12345678901 there");
}

}  // namespace
}  // namespace smp::pipeline
