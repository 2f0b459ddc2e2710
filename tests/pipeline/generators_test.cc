// SPDX-License-Identifier: Apache-2.0
#include "pipeline/generators.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "core/settings.h"
#include "pipeline/simulator.h"
#include "pipeline/verifier.h"
#include "tests/pipeline/schedule_helpers.h"

namespace smp::pipeline {
namespace {

/// The pipelines that a kind of schedule is made for: up to 4 ranks, 4 stages on each of them, and
/// 8 microbatches.
std::vector<ScheduleOptions> small_pipelines(const ScheduleKind& kind) {
  std::vector<ScheduleOptions> result;
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (int microbatches = 1; microbatches <= 8; ++microbatches) {
      for (int per_rank = 1; per_rank <= 4; ++per_rank) {
        result.push_back(ScheduleOptions::looped(ranks, per_rank, microbatches));
      }
      result.push_back(ScheduleOptions::v_shaped(ranks, microbatches));
    }
  }
  const auto misplaced = [&](const auto& options) {
    return kind.why_misplaced(options).has_value();
  };
  result.erase(std::remove_if(result.begin(), result.end(), misplaced), result.end());
  return result;
}

std::string described(const ScheduleKind& kind, const ScheduleOptions& options) {
  return c10::str(kind.name, " ranks ", options.ranks(), " stages ", options.stages(),
                  " microbatches ", options.microbatches());
}

/// Calls `check` for every closed form in every small pipeline. `list` has tests of its own.
void for_all(const std::function<void(const ScheduleKind&, const ScheduleOptions&)>& check) {
  for (const auto& kind : schedule_kinds()) {
    if (kind.name == "list") {
      continue;
    }
    const auto pipelines = small_pipelines(kind);
    EXPECT_GE(pipelines.size(), 4u * 8u) << kind.name;
    for (const auto& options : pipelines) {
      SCOPED_TRACE(described(kind, options));
      check(kind, options);
    }
  }
}

/// F = I = W = 1, and every stage keeps 1 for each microbatch.
StageCosts unit_costs(const ScheduleOptions& options) {
  auto costs = StageCosts::uniform(options.stages());
  costs.kept.assign(static_cast<size_t>(options.stages()), 1);
  return costs;
}

Simulation run(const ScheduleKind& kind, const ScheduleOptions& options) {
  return simulate(lowered(kind, options), options.edges(), unit_costs(options));
}

// --- right in every small pipeline ------------------------------------------------------------

TEST(AllSchedules, AreRightAndSoAreTheirTextForms) {
  for_all([](const ScheduleKind& kind, const ScheduleOptions& options) {
    const auto schedule = lowered(kind, options);
    const int credit = required_credit(schedule, options.edges());
    verify(schedule, options.edges(), VerifyOptions().credit(credit));
    EXPECT_EQ(schedule.has_backward(), kind.trains);
    EXPECT_EQ(parse_schedule(to_string(schedule)), schedule);
    EXPECT_EQ(make_schedule(kind.name, options), kind.generate(options));
  });
}

// The numbers of messages in docs/schedules.md that a channel must hold.
TEST(AllSchedules, NeedSoManyMessagesPerChannel) {
  for_all([](const ScheduleKind& kind, const ScheduleOptions& options) {
    if (kind.placement == Placement::kAny) {
      return;
    }
    const int credit = required_credit(lowered(kind, options), options.edges());
    const int rounds = std::max(1, options.microbatches() / options.ranks());
    if (kind.name == "breadth_first" && options.ranks() > 1 && options.stages() > options.ranks()) {
      EXPECT_EQ(credit, rounds);
    } else {
      EXPECT_LE(credit, kind.placement == Placement::kLooped ? 2 : 1);
    }
  });
}

TEST(AllSchedules, AreRightWhereValuesSkipStages) {
  for_all([](const ScheduleKind& kind, ScheduleOptions options) {
    options.edges(all_pairs(options.stages()));
    const auto order = kind.generate(options);
    const auto edges = options.edges();
    verify(lower(order, edges), edges, VerifyOptions().credit(options.microbatches()));
    // Only some skips, some of them without gradient, and a stage that gets nothing.
    std::vector<StageEdge> some;
    for (size_t i = 0; i < edges.size(); i += 2) {
      some.push_back({edges[i].from, edges[i].to, i % 3 != 0});
    }
    verify(lower(order, some), some, VerifyOptions().credit(options.microbatches()));
  });
}

TEST(AllSchedules, SplitOnlyWhereTheySayThatTheyDo) {
  for_all([](const ScheduleKind& kind, const ScheduleOptions& options) {
    if (options.microbatches() < 8 || options.ranks() < 2) {
      return;
    }
    const auto text = to_string(kind.generate(options));
    EXPECT_EQ(text.find('W') != std::string::npos, kind.splits) << text;
  });
}

// --- time and memory follow the formulas -------------------------------------------------------
//
// p ranks, m microbatches, v stages on each rank, all of them with F = I = W = 1, B = 2 and one
// unit of memory. In the formulas F, B, I and W are the times of a whole rank.

/// The time that a schedule should take beyond m v (F + B), the time of a rank's work.
void expect_idle(const Simulation& simulation, const ScheduleOptions& options, int idle) {
  const int work = 3 * options.microbatches() * options.stages() / options.ranks();
  EXPECT_EQ(simulation.makespan, work + idle);
}

std::vector<double> same_on_all(const ScheduleOptions& options, int value) {
  return std::vector<double>(static_cast<size_t>(options.ranks()), value);
}

/// The peaks of one stage for each rank.
std::vector<int> by_stage(const ScheduleOptions& options, const std::function<int(int)>& peak) {
  std::vector<int> result;
  for (int stage = 0; stage < options.stages(); ++stage) {
    result.push_back(std::min(peak(stage), options.microbatches()));
  }
  return result;
}

/// Simulates the schedule called `name` in every small pipeline of at least `least` microbatches.
void with_each(const std::string& name, const std::function<int(int ranks)>& least,
               const std::function<void(const Simulation&, const ScheduleOptions&)>& check) {
  const auto& kind = schedule_kind(name);
  int checked = 0;
  for (const auto& options : small_pipelines(kind)) {
    if (options.microbatches() >= least(options.ranks())) {
      SCOPED_TRACE(described(kind, options));
      check(run(kind, options), options);
      ++checked;
    }
  }
  EXPECT_GT(checked, 15) << name;
}

int any(int) { return 1; }

// Idle (p - 1) (F + B), rank r keeps min(p - r, m): Narayanan et al., "Efficient Large-Scale
// Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 2.2.
TEST(Formulas, OneForwardOneBackward) {
  with_each("1f1b", any, [](const Simulation& simulation, const ScheduleOptions& options) {
    const int p = options.ranks();
    expect_idle(simulation, options, 3 * (p - 1));
    EXPECT_EQ(peak_in_flight(simulation, options.stages()),
              by_stage(options, [&](int r) { return p - r; }));
  });
}

// The same time, and min(2 (p - r) - 1, m) kept for it.
TEST(Formulas, EagerOneForwardOneBackward) {
  with_each("eager_1f1b", any, [](const Simulation& simulation, const ScheduleOptions& options) {
    const int p = options.ranks();
    expect_idle(simulation, options, 3 * (p - 1));
    EXPECT_EQ(peak_in_flight(simulation, options.stages()),
              by_stage(options, [&](int r) { return 2 * (p - r) - 1; }));
  });
}

// Idle (p - 1) (F + B) / v and, where p divides m, at most p + (p - 1) / v microbatches kept of a
// whole rank, that is v p + p - 1 of stages: Narayanan et al. 2021, section 2.2, and Korthikanti et
// al. 2022, section 4.2.3. The last rank keeps (v - 1) p + 1. With fewer microbatches than ranks
// each lap waits for those that are missing.
TEST(Formulas, InterleavedOneForwardOneBackward) {
  with_each("interleaved_1f1b", any,
            [](const Simulation& simulation, const ScheduleOptions& options) {
              const int p = options.ranks();
              const int m = options.microbatches();
              const int v = options.stages() / p;
              expect_idle(simulation, options, 3 * (p - 1) + 3 * (v - 1) * std::max(0, p - m));
              if (m % p == 0) {
                for (int r = 0; r < p; ++r) {
                  EXPECT_EQ(simulation.peak_memory[static_cast<size_t>(r)],
                            std::min(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1));
                }
              }
            });
}

// Idle (p - 1) (F + B) / v, all m kept: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2023.
TEST(Formulas, BreadthFirst) {
  with_each("breadth_first", any, [](const Simulation& simulation, const ScheduleOptions& options) {
    const int p = options.ranks();
    const int m = options.microbatches();
    const int v = options.stages() / p;
    expect_idle(simulation, options, 3 * (p - 1) + 3 * (v - 1) * std::max(0, p - m));
    EXPECT_EQ(simulation.peak_memory, same_on_all(options, m * v));
  });
}

// Idle (p - 1) (F + I - W), p kept: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, table 1.
TEST(Formulas, ZeroBubbleH1) {
  const auto p_or_more = [](int p) { return p; };
  with_each("zb_h1", p_or_more, [](const Simulation& simulation, const ScheduleOptions& options) {
    const int p = options.ranks();
    expect_idle(simulation, options, p - 1);
    EXPECT_EQ(peak_in_flight(simulation, options.stages()),
              by_stage(options, [&](int) { return p; }));
    EXPECT_EQ(peak_in_flight(simulation, options.stages(), &Action::makes_input_gradients),
              by_stage(options, [&](int r) { return p - r; }));
  });
}

// No rank waits between its first and its last action, 2 p - 1 kept: the same table. The step is
// longer by (p - 1) F, since the last rank begins so late.
TEST(Formulas, ZeroBubbleH2) {
  const auto enough = [](int p) { return 2 * p - 1; };
  with_each("zb_h2", enough, [](const Simulation& simulation, const ScheduleOptions& options) {
    const int p = options.ranks();
    expect_idle(simulation, options, p - 1);
    EXPECT_EQ(spans_of(simulation), same_on_all(options, 3 * options.microbatches()));
    EXPECT_EQ(peak_in_flight(simulation, options.stages()),
              by_stage(options, [&](int) { return 2 * p - 1; }));
    EXPECT_EQ(peak_in_flight(simulation, options.stages(), &Action::makes_input_gradients),
              by_stage(options, [&](int r) { return 2 * (p - r) - 1; }));
  });
}

// No rank waits between its first and its last action, p microbatches of a rank (of two stages)
// kept: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024. The step is longer by
// (p - 1) F / 2.
TEST(Formulas, ZeroBubbleV) {
  const auto enough = [](int p) { return 2 * p - 1; };
  with_each("zbv", enough, [](const Simulation& simulation, const ScheduleOptions& options) {
    const int p = options.ranks();
    expect_idle(simulation, options, p - 1);
    EXPECT_EQ(spans_of(simulation), same_on_all(options, 6 * options.microbatches()));
    EXPECT_EQ(simulation.peak_memory, same_on_all(options, 2 * p));
  });
}

// p + 1/2 microbatches of a rank kept, the README of DeepSeek's DualPipe (PP + 1 stages' for PP = 2
// p). Its idle time, (PP / 2 - 1) (F&B + B - 3 W), counts a forward and a backward that overlap as
// one action. Here one runs after the other, and the first one's results are sent before the
// second: the rest is that the last rank begins (p - 1) F / 2 later.
TEST(Formulas, DualPipeV) {
  const auto enough = [](int p) { return 2 * p; };
  with_each("dualpipe_v", enough, [](const Simulation& simulation, const ScheduleOptions& options) {
    const int p = options.ranks();
    expect_idle(simulation, options, p - 1);
    EXPECT_EQ(simulation.peak_memory, same_on_all(options, 2 * p + 1));
  });
}

// The same formulas where F, I and W differ.
TEST(Formulas, HoldForOtherTimes) {
  const int p = 4;
  const auto idle = [&](const std::string& name, const ScheduleOptions& options, double f, double i,
                        double w) {
    const auto schedule = lower(make_schedule(name, options), options.edges());
    const auto costs = StageCosts::uniform(options.stages(), f, i, w);
    const int v = options.stages() / p;
    return simulate(schedule, options.edges(), costs).makespan -
           options.microbatches() * v * (f + i + w);
  };
  for (const int m : {8, 16}) {
    for (const auto& [f, i, w] : {std::tuple(2.0, 2.0, 2.0), {2.0, 3.0, 1.0}, {4.0, 5.0, 3.0}}) {
      const double b = i + w;
      const ScheduleOptions chain(p, m);
      EXPECT_EQ(idle("simple", chain, f, i, w), (p - 1) * (f + b));
      EXPECT_EQ(idle("1f1b", chain, f, i, w), (p - 1) * (f + b));
      EXPECT_EQ(idle("eager_1f1b", chain, f, i, w), (p - 1) * (f + b));
      EXPECT_EQ(idle("zb_h1", chain, f, i, w), (p - 1) * (f + i - w));
      const auto looped = ScheduleOptions::looped(p, 3, m);
      EXPECT_EQ(idle("interleaved_1f1b", looped, f, i, w), (p - 1) * (f + b));
      EXPECT_EQ(idle("breadth_first", looped, f, i, w), (p - 1) * (f + b));
    }
  }
}

// No order can take less than the work of a rank and the way of the first values to the last rank,
// if there is one direction of flow and stages are equal.
TEST(Formulas, NothingBeatsTheLimit) {
  for_all([](const ScheduleKind& kind, const ScheduleOptions& options) {
    const int work =
        (kind.trains ? 3 : 1) * options.microbatches() * options.stages() / options.ranks();
    EXPECT_GE(run(kind, options).makespan, work + options.ranks() - 1);
  });
}

// --- transfers that take time -----------------------------------------------------------------

// Idle = (p - 1) (F + B + 2c) if enough microbatches are in flight. 1F1B adds 2c (m (p - 1) / p -
// 1) where p divides m: each round trip delays it again.
TEST(Latency, DelaysOnlyWhereTooFewAreInFlight) {
  for (const int p : {2, 4}) {
    for (const int m : {8, 16, 64}) {
      const ScheduleOptions options(p, m);
      auto costs = StageCosts::uniform(p);
      costs.latency.assign(static_cast<size_t>(p - 1), 0.25);
      const auto idle = [&](const std::string& name) {
        const auto schedule = lower(make_schedule(name, options), options.edges());
        return simulate(schedule, options.edges(), costs).makespan - 3 * m;
      };
      const double once = (p - 1) * (3 + 2 * 0.25);
      EXPECT_DOUBLE_EQ(idle("simple"), once);
      EXPECT_DOUBLE_EQ(idle("eager_1f1b"), once);
      EXPECT_DOUBLE_EQ(idle("1f1b"), once + 2 * 0.25 * (m * (p - 1.0) / p - 1));
    }
  }
}

// --- placement and names ----------------------------------------------------------------------

TEST(Placement, IsWhatTheOptionsSay) {
  EXPECT_EQ(ScheduleOptions::looped(2, 3, 1).rank_of_stage(), (std::vector<int>{0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(ScheduleOptions::v_shaped(3, 1).rank_of_stage(), (std::vector<int>{0, 1, 2, 2, 1, 0}));
  EXPECT_EQ(ScheduleOptions::v_shaped(3, 1).ranks(), 3);
}

TEST(Placement, MayNumberTheRanksInAnyOrder) {
  const auto permuted = ScheduleOptions::looped(3, 2, 4).rank_of_stage({2, 0, 1, 2, 0, 1});
  const auto schedule = lowered(interleaved_one_forward_one_backward, permuted);
  verify(schedule, permuted.edges());
  const auto v = ScheduleOptions::v_shaped(2, 4).rank_of_stage({1, 0, 0, 1});
  verify(lowered(zero_bubble_v, v), v.edges());
}

TEST(Placement, IsRefusedWithWhatWouldDo) {
  const auto refused = [](const std::string& name, const ScheduleOptions& options) {
    return error_of([&] { make_schedule(name, options); });
  };
  expect_contains(refused("1f1b", ScheduleOptions::looped(2, 2, 4)),
                  "schedule option rank_of_stage: \"1f1b\" expects one stage on each rank, got "
                  "0,1,0,1. Place the stages so, or use one of these: simple, interleaved, "
                  "interleaved_1f1b, breadth_first, list.");
  expect_contains(refused("zbv", ScheduleOptions::looped(2, 2, 4)),
                  "\"zbv\" expects two stages on each rank, the second ones in reverse, as 0,1,1,0 "
                  "with 2 ranks, got 0,1,0,1");
  expect_contains(refused("breadth_first", ScheduleOptions::v_shaped(2, 4)),
                  "\"breadth_first\" expects the stages to go round all ranks in the same order "
                  "each time, as 0,1,0,1 does with 2 ranks, got 0,1,1,0");
  expect_contains(
      refused("interleaved_1f1b", ScheduleOptions(3, 4).ranks(2).rank_of_stage({0, 1, 0})),
      "got 0,1,0. Place the stages so, or use one of these: simple, interleaved, list.");
}

TEST(Names, AreListedWhereOneIsUnknown) {
  expect_contains(error_of([] { make_schedule("gpipe", ScheduleOptions(2, 2)); }),
                  "there is no schedule \"gpipe\". Use one of these: simple, interleaved, 1f1b, "
                  "eager_1f1b, interleaved_1f1b, breadth_first, zb_h1, zb_h2, zbv, dualpipe_v, "
                  "list, forward_only.");
}

/// core knows the names and placements, too, to check a configuration before anything runs.
TEST(ScheduleKinds, AreThoseOfTheConfiguration) {
  std::set<std::string> kinds = {"auto", "file", "_only_forward"};
  for (const auto& kind : schedule_kinds()) {
    if (kind.trains) kinds.insert(kind.name);
  }
  const auto& values = core::parameter_called("pipeline").values;
  EXPECT_EQ(std::set<std::string>(values.begin(), values.end()), kinds);
}

TEST(ScheduleKinds, TakeTheVirtualStagesThatTheConfigurationAccepts) {
  for (const auto& kind : schedule_kinds()) {
    if (!kind.trains) continue;
    for (int stages = 1; stages <= 3; ++stages) {
      const bool fits = !kind.why_misplaced(kind.place(2, stages, 4));
      const auto validate = [&] {
        Config().partitions(2).pipeline(kind.name).virtual_stages(stages).validate();
      };
      SCOPED_TRACE(c10::str(kind.name, " with ", stages));
      if (fits) {
        EXPECT_NO_THROW(validate());
      } else {
        EXPECT_THROW(validate(), ConfigError);
      }
    }
  }
}

}  // namespace
}  // namespace smp::pipeline
