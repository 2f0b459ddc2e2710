// SPDX-License-Identifier: Apache-2.0
#include "pipeline/unsharding.h"

#include <algorithm>
#include <cstddef>
#include <random>

#include "tests/pipeline/schedule_helpers.h"

namespace smp::pipeline {
namespace {

std::string list_of(const Schedule& schedule, int rank = 0) {
  std::string text;
  for (const Action& action : schedule.actions(rank)) text += to_string(action) + " ";
  return text;
}

/// One rank with so many units, and one microbatch.
Schedule chain(int units) {
  const Schedule stage = parse_schedule(
      "schedule ranks=1 microbatches=1 backward=yes rank_of_stage=0\nrank 0: 0F0 0B0 0REDUCE\n");
  const auto order = order_of_units(stage, std::vector<int>(units, 0),
                                    std::vector<bool>(static_cast<size_t>(units), true));
  return lower(order, chain_edges(units));
}

TEST(Unsharding, GathersTheNextStageWhileOneComputes) {
  EXPECT_EQ(list_of(with_unsharding(chain(3), {{5, 5}, {5, 5}, {5, 5}}, 10)),
            "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 1RESHARD 2F0 1UNSHARD 2B0 2RESHARD "
            "2REDUCE 0UNSHARD 1B0 1RESHARD 1REDUCE 0B0 0RESHARD 0REDUCE ");
}

TEST(Unsharding, WaitsWhereTwoStagesAreTooLarge) {
  EXPECT_EQ(list_of(with_unsharding(chain(2), {{5, 5}, {6, 6}}, 10)),
            "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 1REDUCE 0B0 0RESHARD "
            "0REDUCE ");
}

TEST(Unsharding, PassesOverComputesThatReadNothing) {
  EXPECT_EQ(list_of(with_unsharding(chain(3), {{5, 0}, {0, 0}, {5, 5}}, 10)),
            "0UNSHARD 2UNSHARD 0F0 0RESHARD 1F0 2F0 2B0 2RESHARD 2REDUCE 1B0 1REDUCE 0B0 "
            "0REDUCE ");
}

TEST(Unsharding, GathersWhileARankWaitsForAMessage) {
  const Schedule lowered = lower(parse_schedule("schedule ranks=2 microbatches=1 backward=no "
                                                "rank_of_stage=0,1,1\n"
                                                "rank 0: 0F0\nrank 1: 1F0 2F0\n"),
                                 chain_edges(3));
  EXPECT_EQ(list_of(with_unsharding(lowered, {{1, 0}, {2, 0}, {3, 0}}, 5), 1),
            "1UNSHARD 2UNSHARD 1RECV_F0<0 1F0 1RESHARD 2F0 2RESHARD ");
}

/// The actions from an unshard to its reshard, and the elements that computes between them read.
struct Gathered {
  int stage;
  size_t begin, end;
  int64_t elements = 0;
};

std::vector<Gathered> gathered_in(const std::vector<Action>& actions) {
  std::vector<Gathered> result;
  for (size_t i = 0; i < actions.size(); ++i) {
    if (actions[i].kind != Action::Kind::kUnshard) continue;
    const auto end = std::find(actions.begin() + static_cast<std::ptrdiff_t>(i), actions.end(),
                               Action{Action::Kind::kReshard, actions[i].stage, -1, -1});
    result.push_back({actions[i].stage, i, static_cast<size_t>(end - actions.begin())});
  }
  return result;
}

/// Looks at a list without the spans by which it is made.
void expect_reads_are_met(const Schedule& schedule, const std::vector<StageReads>& reads,
                          int64_t most) {
  for (const auto& actions : schedule.lists()) {
    std::vector<Gathered> all = gathered_in(actions);
    for (size_t i = 0; i < actions.size(); ++i) {
      const Action& action = actions[i];
      const auto& of_stage = reads[static_cast<size_t>(action.stage)];
      const int64_t elements = action.is_compute() ? of_stage.of(action) : 0;
      int found = 0;
      for (Gathered& one : all) {
        if (one.stage != action.stage || i < one.begin || one.end < i) continue;
        ++found;
        one.elements = std::max(one.elements, elements);
      }
      const bool needed = elements > 0 || action.kind == Action::Kind::kUnshard ||
                          action.kind == Action::Kind::kReshard;
      if (needed) EXPECT_EQ(found, 1) << to_string(action);
    }
    for (const Gathered& now : all) {
      EXPECT_GT(now.elements, 0) << "gathered for nothing";
      EXPECT_LT(now.end, actions.size()) << "left at the end";
      int64_t live = 0, together = 0;
      for (const Gathered& other : all) {
        if (other.begin > now.begin || other.end < now.begin) continue;
        live += other.elements;
        ++together;
      }
      EXPECT_LE(together, 2) << "one computes, and one is on its way";
      if (together > 1) EXPECT_LE(live, most);
    }
  }
}

/// Every schedule, divided into units at random.
TEST(Unsharding, RandomUnitsOfAllSchedules) {
  std::mt19937 random(5);
  const auto draw = [&](int most) { return static_cast<int>(random() % (most + 1)); };
  int runs = 0;
  for (int seed = 0; seed < 40; ++seed) {
    for (const auto& kind : schedule_kinds()) {
      const int ranks = 1 + draw(3);
      const auto options = kind.place(ranks, 0, 1 + draw(4));
      if (kind.why_misplaced(options)) continue;
      const Schedule stages = kind.generate(options);
      std::vector<int> stage_of_unit;
      for (int stage = 0; stage < stages.stages(); ++stage) {
        stage_of_unit.insert(stage_of_unit.end(), 1 + draw(3), stage);
      }
      std::vector<StageReads> reads;
      for (size_t i = 0; i < stage_of_unit.size(); ++i) {
        const int64_t forward = draw(4);
        reads.push_back({forward, kind.trains ? std::min<int64_t>(forward, draw(4)) : 0});
      }
      const auto count = static_cast<int>(stage_of_unit.size());
      const std::vector<bool> backward(stage_of_unit.size(), kind.trains);
      const Schedule units =
          lower(order_of_units(stages, stage_of_unit, backward), chain_edges(count));
      const int64_t most = 1 + draw(8);
      SCOPED_TRACE(c10::str(kind.name, ", seed ", seed));
      const Schedule divided = with_unsharding(units, reads, most);
      expect_reads_are_met(divided, reads, most);
      EXPECT_EQ(
          verify_error(divided, chain_edges(count), VerifyOptions().credit(divided.microbatches())),
          "");
      EXPECT_EQ(parse_schedule(to_string(divided)), divided);
      ++runs;
    }
  }
  EXPECT_GT(runs, 400);
}

TEST(Unsharding, VerifierNamesTheAction) {
  const std::vector<StageReads> reads = {{5, 5}, {5, 5}};
  const auto text = [&](const std::string& list, int64_t most) {
    const Schedule schedule = parse_schedule(
        "schedule ranks=1 microbatches=1 backward=no rank_of_stage=0,0\nrank 0: " + list + "\n");
    return error_or_none([&] { verify_unsharding(schedule, reads, most); });
  };
  EXPECT_EQ(text("0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1RESHARD", 5), "");
  expect_contains(text("0UNSHARD 0UNSHARD", 9),
                  "schedule: rank 0 at action 1 (0UNSHARD): the stage is unsharded already.");
  expect_contains(text("0RESHARD", 9),
                  "schedule: rank 0 at action 0 (0RESHARD): the stage is not unsharded.");
  expect_contains(text("0F0", 9),
                  "schedule: rank 0 at action 0 (0F0): it reads divided parameters, and its stage "
                  "is not unsharded.");
  // Gathered elements are there before they are read.
  for (const char* list :
       {"0UNSHARD 1UNSHARD 0F0 1F0", "0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 1RESHARD"}) {
    expect_contains(text(list, 9),
                    "schedule: rank 0 at action 1 (1UNSHARD): the rank has 10 elements of divided "
                    "parameters, 9 are allowed.");
    EXPECT_EQ(text(list, 10).find("elements"), std::string::npos);
  }
  expect_contains(text("0UNSHARD 0F0", 9), "schedule: rank 0 ends with stage 0 unsharded.");
}

}  // namespace
}  // namespace smp::pipeline
