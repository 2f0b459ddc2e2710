// SPDX-License-Identifier: Apache-2.0
#include "pipeline/frame.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/generators.h"
#include "pipeline/verifier.h"
#include "tests/error_of.h"

namespace smp::pipeline {
namespace {

/// Two ranks with a stage each.
constexpr const char* kHeader = "schedule ranks=2 microbatches=1 backward=yes rank_of_stage=0,1\n";
constexpr const char* kFirst = "0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE";
constexpr const char* kSecond = "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE";

Schedule of_lists(const std::string& first, const std::string& second) {
  return parse_schedule(kHeader + ("rank 0: " + first) + "\nrank 1: " + second + "\n");
}

std::string text_of(const Schedule& schedule, int rank) {
  const std::string text = to_string(schedule);
  const std::string before = "rank " + std::to_string(rank) + ": ";
  const auto begin = text.find(before) + before.size();
  return text.substr(begin, text.find('\n', begin) - begin);
}

/// The reason for which lists are refused, or "".
std::string refusal(const std::string& first, const std::string& second) {
  const Schedule schedule = of_lists(first, second);
  return testing::error_or_none([&] { verify(schedule, chain_edges(2)); });
}

std::string around(const std::string& before, const char* list, const std::string& after = "") {
  return before + list + after;
}

TEST(Frame, CopiesComeFirstAndOutputsLast) {
  Frame frame;
  frame.copies = {{0, 1}, {1, 0}};
  frame.outputs = {0, 1};
  const Schedule schedule = with_frame(of_lists(kFirst, kSecond), frame);
  EXPECT_EQ(text_of(schedule, 0),
            around("0SEND_COPY>1 0RECV_COPY<1 ", kFirst, " 0OUTPUTS 1OUTPUTS"));
  EXPECT_EQ(text_of(schedule, 1),
            around("1RECV_COPY<0 1SEND_COPY>0 ", kSecond, " 0OUTPUTS 1OUTPUTS"));
  EXPECT_EQ(testing::error_or_none([&] { verify(schedule, chain_edges(2)); }), "");
  EXPECT_EQ(parse_schedule(to_string(schedule)), schedule);
}

TEST(Frame, CopiesGoInTheOrderOfOwnerAndReader) {
  const Schedule forwards = parse_schedule(
      "schedule ranks=3 microbatches=1 backward=no rank_of_stage=0,1,2\n"
      "rank 0: 0F0\nrank 1: 1F0\nrank 2: 2F0\n");
  Frame frame;
  frame.copies = {{0, 1}, {0, 2}, {1, 2}, {2, 0}};
  const Schedule schedule = with_frame(forwards, frame);
  EXPECT_EQ(text_of(schedule, 0), "0SEND_COPY>1 0SEND_COPY>2 0RECV_COPY<2 0F0");
  EXPECT_EQ(text_of(schedule, 1), "1RECV_COPY<0 1SEND_COPY>2 1F0");
  EXPECT_EQ(text_of(schedule, 2), "2RECV_COPY<0 2RECV_COPY<1 2SEND_COPY>0 2F0");
  EXPECT_EQ(testing::error_or_none([&] { verify_frame(schedule); }), "");
}

/// So many computes ahead as the horizon says, if the list has as many; for the half of a backward
/// that comes first.
TEST(Frame, MicrobatchesAreRecalledAhead) {
  const Schedule one = parse_schedule(
      "schedule ranks=1 microbatches=2 backward=yes rank_of_stage=0\n"
      "rank 0: 0F0 0F1 0I0 0W0 0B1 0REDUCE\n");
  const auto recalled = [&](int horizon) {
    Frame frame;
    frame.loading_horizon = horizon;
    const Schedule schedule = with_frame(one, frame);
    EXPECT_EQ(testing::error_or_none([&] { verify(schedule, {}); }), "");
    return text_of(schedule, 0);
  };
  EXPECT_EQ(recalled(0), "0F0 0F1 0I0 0W0 0B1 0REDUCE");
  EXPECT_EQ(recalled(1), "0F0 0RECALL0 0F1 0I0 0RECALL1 0W0 0B1 0REDUCE");
  EXPECT_EQ(recalled(2), "0RECALL0 0F0 0F1 0RECALL1 0I0 0W0 0B1 0REDUCE");
  EXPECT_EQ(recalled(9), "0RECALL0 0RECALL1 0F0 0F1 0I0 0W0 0B1 0REDUCE");
}

TEST(Frame, RecallsStandBeforeAComputeAndBehindItsMessages) {
  Frame frame;
  frame.loading_horizon = 1;
  EXPECT_EQ(text_of(with_frame(of_lists(kFirst, kSecond), frame), 1),
            "1RECV_F0<0 1RECALL0 1F0 1B0 1SEND_B0>0 1REDUCE");
}

TEST(FrameVerifier, WantsEachCopySentAndReceived) {
  EXPECT_EQ(
      refusal(around("0SEND_COPY>1 ", kFirst), kSecond),
      "[smp] schedule: rank 1 never does 1RECV_COPY<0, but rank 0 does 0SEND_COPY>1. Every copy "
      "that is sent is received once.");
  EXPECT_EQ(
      refusal(kFirst, around("1RECV_COPY<0 ", kSecond)),
      "[smp] schedule: rank 0 never does 0SEND_COPY>1, but rank 1 does 1RECV_COPY<0. Every copy "
      "that is sent is received once.");
  EXPECT_EQ(
      refusal(around("0SEND_COPY>1 0SEND_COPY>1 ", kFirst), around("1RECV_COPY<0 ", kSecond)),
      "[smp] schedule: rank 0 at action 1 (0SEND_COPY>1): copies go in ascending order of owner "
      "and reader, each once, so that no ranks wait for each other.");
}

/// Each would wait until the other has received.
TEST(FrameVerifier, WantsCopiesInOneOrder) {
  EXPECT_EQ(
      refusal(around("0SEND_COPY>1 0RECV_COPY<1 ", kFirst),
              around("1SEND_COPY>0 1RECV_COPY<0 ", kSecond)),
      "[smp] schedule: rank 1 at action 1 (1RECV_COPY<0): copies go in ascending order of owner "
      "and reader, each once, so that no ranks wait for each other.");
}

TEST(FrameVerifier, WantsCopiesBeforeAllElse) {
  EXPECT_EQ(refusal(around("", kFirst, " 0SEND_COPY>1"), around("1RECV_COPY<0 ", kSecond)),
            "[smp] schedule: rank 0 at action 5 (0SEND_COPY>1): copies come before all computes, "
            "transfers and unshards.");
}

/// A divided parameter that is sent is the only one that the rank has whole.
TEST(FrameVerifier, WantsCopiesBeforeAllUnshards) {
  EXPECT_EQ(refusal(around("0UNSHARD 0SEND_COPY>1 ", kFirst), around("1RECV_COPY<0 ", kSecond)),
            "[smp] schedule: rank 0 at action 1 (0SEND_COPY>1): copies come before all computes, "
            "transfers and unshards.");
  EXPECT_EQ(refusal(around("0SEND_COPY>1 0UNSHARD ", kFirst), around("1RECV_COPY<0 ", kSecond)),
            "");
}

TEST(FrameVerifier, WantsCopiesBetweenRanks) {
  EXPECT_EQ(
      refusal(around("0SEND_COPY>0 ", kFirst), kSecond),
      "[smp] schedule: rank 0 at action 0 (0SEND_COPY>0): stage 0 is not on another rank, expected "
      "one that is.");
  EXPECT_EQ(
      refusal(around("1RECV_COPY<0 ", kFirst), kSecond),
      "[smp] schedule: rank 0 at action 0 (1RECV_COPY<0): stage 1 belongs to rank 1. Move the "
      "action there.");
}

TEST(FrameVerifier, WantsRecallsBeforeTheirBackward) {
  EXPECT_EQ(refusal(around("0RECALL0 0RECALL0 ", kFirst), kSecond),
            "[smp] schedule: rank 0 at action 1 (0RECALL0): it was recalled already.");
  EXPECT_EQ(refusal(around("", kFirst, " 0RECALL0"), kSecond),
            "[smp] schedule: rank 0 at action 5 (0RECALL0): its backward came before.");
}

TEST(FrameVerifier, WantsTheSameOutputsAtTheEndOfAllRanks) {
  EXPECT_EQ(refusal(around("", kFirst, " 1OUTPUTS"), around("", kSecond, " 1OUTPUTS")), "");
  EXPECT_EQ(
      refusal(around("", kFirst, " 1OUTPUTS"), kSecond),
      "[smp] schedule: rank 1 takes part in the outputs of no stage, rank 0 in those of stage 1. "
      "All ranks take part in all outputs, in one order.");
  EXPECT_EQ(
      refusal(around("", kFirst, " 0OUTPUTS 1OUTPUTS"), around("", kSecond, " 1OUTPUTS 0OUTPUTS")),
      "[smp] schedule: rank 1 takes part in the outputs of stage 1, 0, rank 0 in those of stage "
      "0, 1. All ranks take part in all outputs, in one order.");
  EXPECT_EQ(
      refusal(around("0OUTPUTS ", kFirst), around("0OUTPUTS ", kSecond)),
      "[smp] schedule: rank 0 at action 1 (0F0): the outputs of a step are its last actions.");
}

/// Steps all ranks through their copies, where a send waits for its receive. False: they stop.
bool gets_to_the_end(const Schedule& schedule) {
  std::vector<std::vector<Action>> left;
  for (const auto& list : schedule.lists()) {
    auto& copies = left.emplace_back();
    for (auto action = list.rbegin(); action != list.rend(); ++action) {
      if (action->is_copy()) copies.push_back(*action);
    }
  }
  for (bool moves = true; moves;) {
    moves = false;
    for (auto& mine : left) {
      if (mine.empty()) continue;
      auto& other = left[schedule.rank_of(mine.back().peer)];
      if (other.empty() || !(other.back() == counterpart(mine.back()))) continue;
      mine.pop_back();
      other.pop_back();
      moves = true;
    }
  }
  return std::all_of(left.begin(), left.end(), [](const auto& list) { return list.empty(); });
}

TEST(FrameVerifier, CopiesThatItAcceptsGetToTheEnd) {
  std::mt19937 random(7);
  const auto below = [&](int bound) { return static_cast<int>(random() % bound); };
  int stopped = 0;
  for (int trial = 0; trial < 300; ++trial) {
    const int ranks = 2 + below(3), stages = ranks + below(4);
    std::vector<int> rank_of_stage;
    for (int s = 0; s < stages; ++s) rank_of_stage.push_back(s < ranks ? s : below(ranks));
    std::set<std::pair<int, int>> pairs;
    for (int i = 0; i < 6; ++i) {
      const std::pair<int, int> pair(below(stages), below(stages));
      if (rank_of_stage[pair.first] != rank_of_stage[pair.second]) pairs.insert(pair);
    }
    Frame frame;
    for (const auto& [from, to] : pairs) frame.copies.push_back({from, to});
    Schedule schedule = with_frame(Schedule(ranks, 1, rank_of_stage, false), frame);
    ASSERT_EQ(testing::error_or_none([&] { verify_frame(schedule); }), "") << to_string(schedule);
    ASSERT_TRUE(gets_to_the_end(schedule)) << to_string(schedule);
    for (auto& list : schedule.lists()) std::shuffle(list.begin(), list.end(), random);
    if (gets_to_the_end(schedule)) continue;
    ++stopped;
    EXPECT_NE(testing::error_or_none([&] { verify_frame(schedule); }), "") << to_string(schedule);
  }
  EXPECT_GT(stopped, 20) << "the shuffled lists show nothing";
}

}  // namespace
}  // namespace smp::pipeline
