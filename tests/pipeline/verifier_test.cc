// SPDX-License-Identifier: Apache-2.0
#include "pipeline/verifier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "pipeline/action.h"
#include "pipeline/generators.h"
#include "pipeline/simulator.h"
#include "tests/pipeline/schedule_helpers.h"

namespace smp::pipeline {
namespace {

// --- the verifier rejects -------------------------------------------------------------------

/// The error of a chain of two stages after `change` was made to the list of one rank.
std::string error_after(Generator generator, int microbatches, int rank,
                        const std::function<void(std::vector<Action>&)>& change) {
  auto schedule = lowered(generator, ScheduleOptions(2, microbatches));
  change(schedule.actions(rank));
  return verify_error(schedule, chain_edges(2));
}

std::vector<Action>::iterator find(std::vector<Action>& actions, const std::string& text) {
  return std::find(actions.begin(), actions.end(), parse_action(text));
}

void swap_actions(std::vector<Action>& actions, const std::string& a, const std::string& b) {
  std::iter_swap(find(actions, a), find(actions, b));
}

TEST(Rejects, DroppedActions) {
  const auto without = [](int rank, const std::string& text) {
    return error_after(simple, 2, rank, [&](auto& list) { list.erase(find(list, text)); });
  };
  expect_contains(without(0, "0F1"),
                  "rank 0 never does 0F1 in its 8 actions. Every action of a step happens exactly "
                  "once.");
  expect_contains(without(1, "1B0"), "rank 1 never does 1B0 in its 8 actions");
  expect_contains(without(1, "1REDUCE"), "rank 1 never does 1REDUCE");
  expect_contains(
      without(0, "0SEND_F1>1"),
      "rank 0 never does 0SEND_F1>1, but rank 1 receives that at action 2 (1RECV_F1<0)");
  expect_contains(
      without(0, "0RECV_B0<1"),
      "rank 0 never does 0RECV_B0<1, but rank 1 sends that at action 5 (1SEND_B0>0). Every "
      "send has exactly one receive.");
}

TEST(Rejects, RepeatedActions) {
  expect_contains(error_after(simple, 2, 0, [](auto& list) { list.push_back(forward_of(0, 1)); }),
                  "rank 0 at action 9 (0F1): it was already done at action 2");
}

TEST(Rejects, ActionsOutOfOrder) {
  expect_contains(
      error_after(simple, 1, 1, [](auto& list) { swap_actions(list, "1F0", "1B0"); }),
      "rank 1 at action 1 (1B0): comes before 1F0 (action 2): a backward uses what its forward");
  expect_contains(
      error_after(simple, 1, 0, [](auto& list) { swap_actions(list, "0F0", "0SEND_F0>1"); }),
      "rank 0 at action 0 (0SEND_F0>1): comes before 0F0 (action 1): a stage sends what its "
      "forward");
  expect_contains(
      error_after(simple, 1, 1, [](auto& list) { swap_actions(list, "1B0", "1SEND_B0>0"); }),
      "rank 1 at action 2 (1SEND_B0>0): comes before 1B0 (action 3): a stage sends what its "
      "backward");
  expect_contains(
      error_after(simple, 1, 1, [](auto& list) { swap_actions(list, "1RECV_F0<0", "1F0"); }),
      "rank 1 at action 0 (1F0): comes before 1RECV_F0<0 (action 1): a forward uses the values");
  expect_contains(
      error_after(simple, 1, 0, [](auto& list) { swap_actions(list, "0RECV_B0<1", "0B0"); }),
      "rank 0 at action 2 (0B0): comes before 0RECV_B0<1 (action 3): a backward uses the "
      "gradients");
  expect_contains(
      error_after(simple, 1, 0, [](auto& list) { swap_actions(list, "0B0", "0REDUCE"); }),
      "rank 0 at action 3 (0REDUCE): comes before 0B0 (action 4): gradients are reduced when all");
  expect_contains(
      error_after(simple, 2, 0, [](auto& list) { swap_actions(list, "0F0", "0F1"); }),
      "rank 0 at action 0 (0F1): comes before 0F0 (action 2): a stage runs its microbatches in");
}

TEST(Rejects, WhatDoesNotBelongThere) {
  const auto with_first = [](const Action& action) {
    return error_after(simple, 1, 0, [&](auto& list) { list.insert(list.begin(), action); });
  };
  expect_contains(with_first(forward_of(1, 0)),
                  "rank 0 at action 0 (1F0): stage 1 belongs to rank 1");
  expect_contains(with_first(forward_of(2, 0)), "(2F0): there is no stage 2, expected 0 to 1");
  expect_contains(with_first(forward_of(0, 1)), "(0F1): there is no microbatch 1, expected 0 to 0");
  expect_contains(with_first(recv_forward(0, 0, 1)),
                  "(0RECV_F0<1): stage 1 sends no values to stage 0");
  expect_contains(with_first(send_forward(0, 0, 7)),
                  "(0SEND_F0>7): stage 0 sends no values to stage 7");

  const auto evaluation = lowered(forward_only, ScheduleOptions(2, 1));
  auto with_backward = evaluation;
  with_backward.actions(0).push_back(backward_of(0, 0));
  expect_contains(verify_error(with_backward, chain_edges(2)),
                  "(0B0): the schedule says backward=no");

  const auto training = lowered(simple, ScheduleOptions(2, 1));
  expect_contains(verify_error(training, {{0, 1, false}}),
                  "(0RECV_B0<1): the values from stage 0 to stage 1 have no gradient");
  const auto one_rank = parse_schedule(
      "schedule ranks=1 microbatches=1 backward=no rank_of_stage=0,0\n"
      "rank 0: 0F0 0SEND_F0>1 1RECV_F0<0 1F0\n");
  expect_contains(verify_error(one_rank, chain_edges(2)),
                  "(0SEND_F0>1): stages 0 and 1 are on the same rank and need no transfer");
}

TEST(Rejects, StagesOfOneRankOutOfOrder) {
  const auto order_error = [](const std::string& actions) {
    const auto schedule = parse_schedule(
        "schedule ranks=1 microbatches=1 backward=yes rank_of_stage=0,0\nrank 0: " + actions);
    return verify_error(schedule, chain_edges(2));
  };
  EXPECT_EQ(order_error("0F0 1F0 1B0 1REDUCE 0B0 0REDUCE"), "");
  expect_contains(order_error("1F0 0F0 1B0 1REDUCE 0B0 0REDUCE"),
                  "rank 0 at action 0 (1F0): comes before 0F0 (action 1): a forward uses");
  expect_contains(order_error("0F0 1F0 0B0 1B0 1REDUCE 0REDUCE"),
                  "rank 0 at action 2 (0B0): comes before 1B0 (action 3): a backward uses");
}

TEST(Rejects, TooManyInFlight) {
  const auto schedule = lowered(simple, ScheduleOptions(2, 4));
  EXPECT_EQ(verify_error(schedule, chain_edges(2), VerifyOptions().active_microbatches(4)), "");
  expect_contains(
      verify_error(schedule, chain_edges(2), VerifyOptions().active_microbatches(3)),
      "rank 0 at action 6 (0F3): makes 4 microbatches in flight, active_microbatches allows 3");
}

TEST(Rejects, MoreMemoryThanARankMayKeep) {
  const auto schedule = from_lines({"0F0 0F1 0I0 0I1 0F2 0W0 0W1 0B2 0REDUCE"}, 3);
  auto costs = StageCosts::uniform(1);
  costs.kept = {5};
  costs.kept_for_weights = {2};
  costs.gradients_for_weights = {1};
  const auto bound = [&](double limit) {
    return VerifyOptions().memory_limit({limit}).costs(costs);
  };
  EXPECT_EQ(verify_error(schedule, {}, bound(11)), "");
  // The gradients that the second half starts from lie there beside all of two microbatches.
  expect_contains(verify_error(schedule, {}, bound(10)),
                  "rank 0 at action 2 (0I0): makes the rank keep 11, memory_limit allows 10. Run a "
                  "backward first, or raise memory_limit.");
  // And not where the limit is first exceeded, so that this one would suffice.
  expect_contains(verify_error(schedule, {}, bound(4)), "rank 0 at action 2 (0I0): makes");
  // Bytes are whole numbers.
  costs.kept = {1234567890};
  expect_contains(
      verify_error(schedule, {}, bound(5)),
      "rank 0 at action 2 (0I0): makes the rank keep 2469135781, memory_limit allows 5.");
  // Nothing is kept on a stage without a backward.
  const auto evaluation = lowered(forward_only, ScheduleOptions(2, 2));
  auto of_two = StageCosts::uniform(2);
  of_two.kept = {1, 1};
  EXPECT_EQ(
      verify_error(evaluation, chain_edges(2), VerifyOptions().memory_limit({0, 0}).costs(of_two)),
      "");
}

TEST(Rejects, MessagesOutOfOrder) {
  const std::string reason = "the messages of a channel are sent and received in ascending order";
  const auto received =
      from_lines({"0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F1<0 1RECV_F0<0 1F0 1F1"}, 2, false);
  expect_contains(verify_error(received, chain_edges(2), VerifyOptions().credit(2)),
                  "rank 1 at action 0 (1RECV_F1<0): comes before 1RECV_F0<0 (action 1): " + reason);
  const auto sent =
      from_lines({"0F0 0F1 0SEND_F1>1 0SEND_F0>1", "1RECV_F0<0 1RECV_F1<0 1F0 1F1"}, 2, false);
  expect_contains(verify_error(sent, chain_edges(2), VerifyOptions().credit(2)),
                  "rank 0 at action 2 (0SEND_F1>1): comes before 0SEND_F0>1 (action 3): " + reason);
}

// All forwards first on rank 0, one forward and one backward in turns on rank 1.
const char* const kTwoMinds =
    "schedule ranks=2 microbatches=4 backward=yes rank_of_stage=0,1\n"
    "rank 0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n"
    "rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3\n";

TEST(Rejects, SendsIntoFullChannels) {
  const auto order = parse_schedule(kTwoMinds);
  const auto schedule = lower(order, chain_edges(2));
  const auto error = verify_error(schedule, chain_edges(2));
  expect_contains(error, "deadlock with a credit of 1 unreceived message(s)");
  expect_contains(error,
                  "rank 0 at action 7 (0SEND_F3>1) waits for 1RECV_F2<0, which rank 1 has not "
                  "done: it is blocked at action 7 (1SEND_B1>0)");
  expect_contains(error,
                  "rank 1 at action 7 (1SEND_B1>0) waits for 0RECV_B0<1, which rank 0 has not "
                  "done: it is blocked at action 7 (0SEND_F3>1)");
  EXPECT_EQ(verify_error(schedule, chain_edges(2), VerifyOptions().credit(2)), "");
  EXPECT_EQ(required_credit(schedule, chain_edges(2)), 2);
  expect_contains(verify_error(schedule, chain_edges(2), VerifyOptions().credit(0)),
                  "credit of a channel must be at least 1 message, got 0");
}

TEST(Rejects, ACircleThatNoCreditBreaks) {
  // Rank 0 wants the gradient of microbatch 0 before it sends the values of microbatch 1, and
  // rank 1 the values of microbatch 1 before it sends the gradient of microbatch 0.
  const auto schedule =
      from_lines({"0F0 0SEND_F0>1 0RECV_B0<1 0B0 0F1 0SEND_F1>1 0RECV_B1<1 0B1 0REDUCE",
                  "1RECV_F0<0 1RECV_F1<0 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>0 1REDUCE"},
                 2);
  const std::string reason =
      "rank 0 at action 2 (0RECV_B0<1) waits for 1SEND_B0>0, which rank 1 has not done: it is "
      "blocked at action 1 (1RECV_F1<0)";
  expect_contains(verify_error(schedule, chain_edges(2)), reason);
  expect_contains(error_of([&] { required_credit(schedule, chain_edges(2)); }), reason);
  expect_contains(error_of([&] { simulate(schedule, chain_edges(2), StageCosts::unit(2)); }),
                  reason);
}

TEST(Rejects, SkipsWithTooLittleCredit) {
  // Rank 0 fills the skip to the last rank with values while that fills the way back with
  // gradients, each waiting for the other to receive.
  auto options = ScheduleOptions(4, 8).edges(all_pairs(4));
  const auto schedule = lowered(interleaved, options);
  const int credit = required_credit(schedule, options.edges());
  EXPECT_GT(credit, 1);
  expect_contains(verify_error(schedule, options.edges(), VerifyOptions().credit(credit - 1)),
                  "deadlock");
  EXPECT_EQ(verify_error(schedule, options.edges(), VerifyOptions().credit(credit)), "");
}

TEST(Rejects, EveryDroppedRepeatedMisplacedOrTurnedAction) {
  const auto edges = all_pairs(3);
  for (const auto generator : {simple, interleaved, forward_only}) {
    const auto good = lowered(generator, ScheduleOptions(3, 3).edges(edges));
    const auto options = VerifyOptions().credit(3);
    verify(good, edges, options);
    for (int rank = 0; rank < 3; ++rank) {
      for (size_t i = 0; i < good.actions(rank).size(); ++i) {
        const auto expect_rejected = [&](const char* what, const auto& change) {
          auto schedule = good;
          change(schedule, schedule.actions(rank));
          EXPECT_NE(verify_error(schedule, edges, options), "")
              << what << " rank " << rank << " action " << i << "\n"
              << to_string(schedule);
        };
        const auto offset = static_cast<std::ptrdiff_t>(i);
        expect_rejected("dropped", [&](auto&, auto& list) { list.erase(list.begin() + offset); });
        expect_rejected("repeated", [&](auto&, auto& list) {
          list.insert(list.begin() + offset, Action(list[i]));
        });
        expect_rejected("misplaced", [&](auto& schedule, auto& list) {
          schedule.actions((rank + 1) % 3).push_back(list[i]);
          list.erase(list.begin() + offset);
        });
        expect_rejected("turned", [&](auto&, auto& list) {
          using Kind = Action::Kind;
          list[i].kind = list[i].kind == Kind::kForward ? Kind::kBackward : Kind::kForward;
        });
      }
    }
  }
}

// --- split backwards ------------------------------------------------------------------------

std::string split_error(const std::string& actions, int microbatches) {
  const auto schedule = from_lines({actions}, microbatches);
  return verify_error(schedule, {});
}

TEST(SplitBackward, IsAcceptedInEveryRightOrder) {
  EXPECT_EQ(split_error("0F0 0I0 0W0 0REDUCE", 1), "");
  EXPECT_EQ(split_error("0F0 0F1 0I0 0I1 0W0 0W1 0REDUCE", 2), "");
  EXPECT_EQ(split_error("0F0 0F1 0I0 0W0 0B1 0REDUCE", 2), "");
  EXPECT_EQ(split_error("0F0 0F1 0B0 0I1 0W1 0REDUCE", 2), "");
}

TEST(SplitBackward, IsRejectedWithTheReason) {
  expect_contains(split_error("0F0 0I0 0REDUCE", 1),
                  "rank 0 never does 0W0, the other half of 0I0 (action 1)");
  expect_contains(split_error("0F0 0W0 0REDUCE", 1),
                  "rank 0 never does 0I0, the other half of 0W0 (action 1)");
  expect_contains(split_error("0F0 0I0 0W0 0B0 0REDUCE", 1),
                  "rank 0 at action 1 (0I0): half a backward beside the whole one, 0B0 (action 3)");
  expect_contains(split_error("0F0 0REDUCE", 1), "rank 0 never does 0B0");
  expect_contains(split_error("0F0 0W0 0I0 0REDUCE", 1),
                  "rank 0 at action 1 (0W0): comes before 0I0 (action 2): the weight half uses");
  expect_contains(split_error("0I0 0F0 0W0 0REDUCE", 1),
                  "rank 0 at action 0 (0I0): comes before 0F0 (action 1): a backward uses");
  expect_contains(split_error("0F0 0I0 0REDUCE 0W0", 1),
                  "(0REDUCE): comes before 0W0 (action 3): gradients are reduced when all");
}

TEST(SplitBackward, KeepsTheOrderOfSums) {
  const std::string reason = "a stage runs its microbatches in ascending order";
  expect_contains(split_error("0F0 0F1 0I0 0I1 0W1 0W0 0REDUCE", 2),
                  "(0W1): comes before 0W0 (action 5): " + reason);
  // The whole backward of microbatch 1 adds to the weights before the second half of 0 does.
  expect_contains(split_error("0F0 0F1 0I0 0B1 0W0 0REDUCE", 2),
                  "(0B1): comes before 0W0 (action 4): " + reason);
  expect_contains(split_error("0F0 0F1 0I1 0I0 0W0 0W1 0REDUCE", 2),
                  "(0I1): comes before 0I0 (action 3): " + reason);
}

TEST(SplitBackward, SendsWhatItsFirstHalfMade) {
  const std::string rank_0 = "0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0 0REDUCE";
  const auto error = [&](const std::string& rank_1) {
    return verify_error(from_lines({rank_0, rank_1}, 1), chain_edges(2));
  };
  EXPECT_EQ(error("1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1REDUCE"), "");
  EXPECT_EQ(error("1RECV_F0<0 1F0 1I0 1W0 1SEND_B0>0 1REDUCE"), "");
  expect_contains(error("1RECV_F0<0 1F0 1SEND_B0>0 1I0 1W0 1REDUCE"),
                  "rank 1 at action 2 (1SEND_B0>0): comes before 1I0 (action 3)");
}

TEST(SplitBackward, IsInFlightUntilItsSecondHalf) {
  const auto schedule = from_lines({"0F0 0F1 0I0 0I1 0W0 0F2 0W1 0B2 0REDUCE"}, 3);
  const auto bound = [](int active) { return VerifyOptions().active_microbatches(active); };
  EXPECT_EQ(verify_error(schedule, {}, bound(2)), "");
  expect_contains(verify_error(schedule, {}, bound(1)), "rank 0 at action 1 (0F1): makes 2");
  const auto late = from_lines({"0F0 0F1 0I0 0I1 0F2 0W0 0W1 0B2 0REDUCE"}, 3);
  expect_contains(verify_error(late, {}, bound(2)), "rank 0 at action 4 (0F2): makes 3");
}

/// How many orders of the list of rank 1 the verifier accepts.
int count_accepted(const Lines& lines, int microbatches, bool backward, int credit) {
  auto schedule = from_lines(lines, microbatches, backward);
  auto list = schedule.actions(1);
  std::vector<size_t> order(list.size());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
  }
  int accepted = 0;
  do {
    for (size_t i = 0; i < order.size(); ++i) {
      schedule.actions(1)[i] = list[order[i]];
    }
    accepted += verify_error(schedule, chain_edges(2), VerifyOptions().credit(credit)).empty();
  } while (std::next_permutation(order.begin(), order.end()));
  return accepted;
}

TEST(Rejects, AllOrdersExceptTheRightOnes) {
  // Receive, forward, backward, then send and reduce in either order.
  const Lines training = {"0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE",
                          "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE"};
  EXPECT_EQ(count_accepted(training, 1, true, 1), 2);
  // Forwards in order, receives in order, each forward after its receive: R0 F0 R1 F1 and
  // R0 R1 F0 F1.
  const Lines evaluation = {"0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1F0 1RECV_F1<0 1F1"};
  EXPECT_EQ(count_accepted(evaluation, 2, false, 1), 2);
  EXPECT_EQ(count_accepted(evaluation, 2, false, 2), 2);
}

// --- torch's 1F1B ---------------------------------------------------------------------------

/// The compute order of torch 2.11's Schedule1F1B._get_pipeline_order: warm-up forwards, then one
/// forward and one backward, then the remaining backwards. It counts forwards from 0 where there
/// was no warm-up, so on the last rank the first one is that of microbatch 1.
Schedule torchs_one_f_one_b(int stages, int microbatches) {
  std::vector<int> rank_of_stage;
  for (int stage = 0; stage < stages; ++stage) {
    rank_of_stage.push_back(stage);
  }
  Schedule order(stages, microbatches, rank_of_stage, true);
  for (int rank = 0; rank < stages; ++rank) {
    auto& actions = order.actions(rank);
    int forward = 0;
    const int warmup = std::min(stages - 1 - rank, microbatches);
    for (int i = 0; i < warmup; ++i) {
      forward = i;
      actions.push_back(forward_of(rank, i));
    }
    int backward = 0;
    for (int i = warmup; i < microbatches; ++i) {
      actions.push_back(forward_of(rank, ++forward));
      actions.push_back(backward_of(rank, backward++));
    }
    while (backward < microbatches) {
      actions.push_back(backward_of(rank, backward++));
    }
  }
  return order;
}

TEST(OneFOneB, TorchsOrderIsRejectedAndTheRightOneAccepted) {
  const auto edges = chain_edges(4);
  const auto torchs = lower(torchs_one_f_one_b(4, 8), edges);
  const auto error = verify_error(torchs, edges);
  expect_contains(error, "rank 3 at action ");
  expect_contains(error, "(3RECV_F8<2): there is no microbatch 8, expected 0 to 7");

  // The right order differs on the last rank only.
  const auto right = lowered(one_forward_one_backward, ScheduleOptions(4, 8));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(torchs.actions(rank), right.actions(rank)) << rank;
  }
  // Rank r keeps stages - r microbatches, and no rank more than that in total.
  verify(right, edges, VerifyOptions().active_microbatches(4));
  const auto run = simulate(right, edges, StageCosts::unit(4));
  EXPECT_EQ(run.makespan, 2 * (8 + 4 - 1));
  EXPECT_EQ(peak_in_flight(run, 4), (std::vector<int>{4, 3, 2, 1}));
}

TEST(OneFOneB, LatencyMatchesTheFormula) {
  // Idle = (p - 1) (F + B + 2c) + 2c (m (p - 1) / p - 1) where p divides m.
  auto costs = StageCosts::unit(4);
  costs.latency = {0.25, 0.25, 0.25};
  const auto edges = chain_edges(4);
  for (const int m : {4, 8, 64}) {
    const auto run =
        simulate(lowered(one_forward_one_backward, ScheduleOptions(4, m)), edges, costs);
    EXPECT_DOUBLE_EQ(run.makespan - 2 * m, 3 * (2 + 0.5) + 0.5 * (m * 3.0 / 4 - 1));
  }
}

}  // namespace
}  // namespace smp::pipeline
