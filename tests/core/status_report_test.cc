// SPDX-License-Identifier: Apache-2.0
#include "core/status_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/status.h"

namespace smp::core {
namespace {

using Kind = ThreadState::Kind;

RankStatus working(int rank, const std::string& action, double seconds,
                   ThreadState state = ThreadState()) {
  RankStatus status;
  status.rank = rank;
  status.process = 20817 + rank;
  status.step = 12;
  status.action = action;
  status.action_seconds = seconds;
  status.state = std::move(state);
  return status;
}

RankStatus waiting(int rank, const std::string& action, std::vector<int> waits_for,
                   const std::string& wait) {
  RankStatus status = working(rank, action, 41.4, {Kind::kSleeps, "futex"});
  status.waits_for = std::move(waits_for);
  status.wait = wait;
  status.wait_seconds = 40.6;
  return status;
}

JobStatus job(std::vector<RankStatus> ranks, std::vector<std::string> hosts = {}) {
  JobStatus status;
  status.name = "20817";
  status.program = "gpt";
  status.seconds = 754;
  status.hosts = hosts.empty() ? std::vector<std::string>(ranks.size(), "vm") : std::move(hosts);
  status.ranks = std::move(ranks);
  return status;
}

TEST(StatusReport, ATableOfTheRanksAndTheChainToTheCause) {
  EXPECT_EQ(status_text(job({waiting(0, "receive 1B0", {1}, "channel receive"),
                             working(1, "1B0", 41.2, {Kind::kStopped, ""}),
                             waiting(2, "train()", {0, 1, 3, 4}, "all_gather"),
                             working(3, kUsersCode, 0.04)})),
            "job 20817: gpt, 4 ranks, for 13 min\n"
            "  rank  process  step  does           for  waits for               state\n"
            "     0    20817    12  receive 1B0   41 s  rank 1, 41 s            waits\n"
            "     1    20818    12  1B0           41 s                          stopped\n"
            "     2    20819    12  train()       41 s  ranks 0, 1, 3, 4, 41 s  waits\n"
            "     3    20820    12  user's code  0.0 s                          computes\n"
            "rank 0 waits for 1B0 of rank 1, which has been in 1B0 of step 12 for 41 s (rank 1: "
            "stopped)\n");
}

TEST(StatusReport, EachCauseHasItsLongestChain) {
  EXPECT_EQ(
      status_text(job({waiting(0, "reduce 0", {2}, "all_reduce"),
                       waiting(1, "send 0F3", {0}, "channel send"),
                       working(2, kUsersCode, 7300, {Kind::kSleeps, "read"}),
                       waiting(3, kUsersCode, {4}, "broadcast"),
                       working(4, "smp::save", 9.9, {Kind::kBlocked, "fsync", 300})})),
      "job 20817: gpt, 5 ranks, for 13 min\n"
      "  rank  process  step  does           for  waits for     state\n"
      "     0    20817    12  reduce 0      41 s  rank 2, 41 s  waits\n"
      "     1    20818    12  send 0F3      41 s  rank 0, 41 s  waits\n"
      "     2    20819    12  user's code  2.0 h                sleeps in read\n"
      "     3    20820    12  user's code   41 s  rank 4, 41 s  waits\n"
      "     4    20821    12  smp::save    9.9 s                blocked in the kernel in "
      "fsync, 300 MiB swapped out\n"
      "rank 1 waits for rank 0 in send 0F3, which waits for rank 2 in all_reduce of reduce 0, "
      "which has been in the user's code after step 12 for 2.0 h (rank 2: sleeps in read)\n"
      "rank 3 waits for rank 4 in broadcast, which has been in smp::save after step 12 for "
      "9.9 s (rank 4: blocked in the kernel in fsync, 300 MiB swapped out)\n");
}

TEST(StatusReport, ACircle) {
  const JobStatus circle = job(
      {waiting(0, "smp::barrier", {1}, "barrier"), waiting(1, "evaluate()", {0}, "all_gather")});
  EXPECT_EQ(wait_chain(circle, 1),
            "rank 1 waits for rank 0 in all_gather of evaluate(), which waits for rank 1 in "
            "smp::barrier: a circle, as of calls that do not match");
  EXPECT_FALSE(stall_cause(circle, 1));
}

/// The call of each of them; a rank that waits for one of them has called nothing wrong.
TEST(StatusReport, StacksOfACircle) {
  JobStatus circle =
      job({waiting(0, "train()", {1}, "all_reduce"), waiting(1, "smp::barrier", {2}, "barrier"),
           waiting(2, "evaluate()", {1}, "all_gather")});
  EXPECT_EQ(causes_of_waits(circle), (std::vector<int>{1, 2}));
  circle.ranks[0].stack = {"main"};
  circle.ranks[1].stack = {"smp::barrier()", "main"};
  circle.ranks[2].stack = {"evaluate()", "main"};
  const std::string text = status_text(circle);
  EXPECT_THAT(text, ::testing::HasSubstr(": a circle, as of calls that do not match\n"
                                         "rank 1 is in smp::barrier()"));
  EXPECT_THAT(text, ::testing::HasSubstr("\nrank 2 is in evaluate()"));
  EXPECT_THAT(text, ::testing::Not(::testing::HasSubstr("rank 0 is in")));
}

TEST(StatusReport, AChainThatLeavesTheHost) {
  const JobStatus here = job({waiting(0, "receive 1B0", {2}, "irecv"), working(1, "0F0", 1)},
                             {"h1", "h1", "h2", "h2"});
  EXPECT_EQ(status_text(here),
            "job 20817: gpt, 4 ranks, for 13 min\n"
            "  rank  process  step  does           for  waits for     state\n"
            "     0    20817    12  receive 1B0   41 s  rank 2, 41 s  waits\n"
            "     1    20818    12  0F0          1.0 s                computes\n"
            "ranks 2, 3 are on host h2: call smprun --status there\n"
            "rank 0 waits for 1B0 of rank 2, which is on host h2\n");
  EXPECT_FALSE(stall_cause(here, 0));
}

TEST(StatusReport, ARankThatHasEnded) {
  RankStatus gone;
  gone.rank = 1;
  gone.state.kind = Kind::kEnded;
  const JobStatus rest = job({waiting(0, "receive 1B0", {1}, "irecv"), gone});
  EXPECT_EQ(status_text(rest),
            "job 20817: gpt, 2 ranks, for 13 min\n"
            "  rank  process  step  does          for  waits for     state\n"
            "     0    20817    12  receive 1B0  41 s  rank 1, 41 s  waits\n"
            "     1                                                  ended\n"
            "rank 0 waits for 1B0 of rank 1, which has ended\n");
  EXPECT_EQ(stall_cause(rest, 0)->how, "has ended");
}

// The cause among the ranks that a collective waits for is the one that stands still, not the one
// that is slow; and one that another waits for comes before one that is slow.
TEST(StatusReport, TheRankThatExplainsMostIsTheCause) {
  const RankStatus slow = working(1, "0F0", 3),
                   stopped = working(3, "1F0", 8, {Kind::kStopped, ""});
  const RankStatus middle = waiting(2, "receive 1F0", {3}, "channel receive");
  EXPECT_EQ(
      stall_cause(job({waiting(0, "train()", {1, 3}, "all_reduce"), slow, middle, stopped}), 0)
          ->rank,
      3);
  const auto cause =
      stall_cause(job({waiting(0, "train()", {1, 2}, "all_reduce"), slow, middle, stopped}), 0);
  ASSERT_TRUE(cause);
  EXPECT_EQ(cause->rank, 3);
  EXPECT_EQ(cause->how, "is stopped; it has been in 1F0 of step 12 for 8.0 s");
}

TEST(StatusReport, SlowIsNotDead) {
  const RankStatus waits = waiting(0, "train()", {1}, "all_gather");
  EXPECT_EQ(stall_cause(job({waits, working(1, kUsersCode, 20)}), 0)->how,
            "computes; it has been in the user's code after step 12 for 20 s");
  EXPECT_EQ(stall_cause(job({waits, working(1, kUsersCode, 20, {Kind::kSleeps, ""})}), 0)->how,
            "sleeps; it has been in the user's code after step 12 for 20 s");
  EXPECT_EQ(stall_cause(job({waits, working(1, "1F0", 20, {Kind::kBlocked, "read", 0})}), 0)->how,
            "is blocked in the kernel in read; it has been in 1F0 of step 12 for 20 s");
}

/// Its wait does not hold the others up.
TEST(StatusReport, ARankThatIsStoppedInAWaitIsTheCause) {
  RankStatus stopped = waiting(1, "receive 0F3", {0}, "channel receive");
  stopped.state = {Kind::kStopped, ""};
  const JobStatus both = job({waiting(0, "receive 1B0", {1}, "channel receive"), stopped});
  EXPECT_EQ(wait_chain(both, 0),
            "rank 0 waits for 1B0 of rank 1, which has been in receive 0F3 of step 12 for 41 s "
            "(rank 1: stopped)");
  EXPECT_EQ(wait_chain(both, 1), "");
}

}  // namespace
}  // namespace smp::core
