// SPDX-License-Identifier: Apache-2.0
#include "tools/failure_report.h"

#include <gtest/gtest.h>

namespace smp::tools {
namespace {

using core::Failure;
using Kind = Failure::Kind;

Failure failure(int rank, Kind kind, std::vector<int> missing, std::string message) {
  static int64_t order = 0;
  return {rank, ++order, kind, std::move(missing), std::nullopt, std::move(message)};
}

ProcessResult ended(int status, const std::string& mpirun_says = "") {
  ProcessResult result;
  result.exit_status = status;
  result.error_tail = mpirun_says;
  return result;
}

// The text of Open MPI 4.1.
const char* const kKilled =
    "--------------------\nmpirun noticed that process rank 1 with PID 0 on node vm exited on "
    "signal "
    "9 (Killed).\n";
const char* const kExited =
    "the job to be terminated. The first process to do so was:\n\n  Process name: [[26449,1],12]\n "
    " "
    "Exit code:    7\n";
const char* const kAborted =
    "mpirun noticed that process rank 0 with PID 0 on node vm exited on signal 6 (Aborted).\n";

TEST(FailureReport, ReadsMpirun) {
  const auto killed = ended_rank(kKilled);
  ASSERT_TRUE(killed);
  EXPECT_EQ(killed->rank, 1);
  EXPECT_EQ(killed->how, "was ended by signal 9 (Killed)");
  const auto exited = ended_rank(kExited);
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->rank, 12);
  EXPECT_EQ(exited->how, "ended with exit status 7");
  EXPECT_FALSE(ended_rank("anything else"));
  EXPECT_FALSE(ended_rank("process rank 1 with PID 0 on node vm exited on signal 9 (Kil"));
  EXPECT_FALSE(ended_rank("Process name: [[26449,1],12]\n  Exit code: none"));
}

// Ranks print any text between the lines of mpirun.
TEST(FailureReport, ReadsMpirunAfterAnyLine) {
  const std::string filler(1 << 20, 'x'), digits(1 << 20, '9');
  for (const std::string& begin :
       {std::string("process rank 2 with PID 5 on node "),
        std::string("process rank 2 with PID 5 on node vm exited on signal 9 ("),
        std::string("process rank "), std::string("Process name: [["),
        std::string("Process name: [[1,1],2]\nExit code:")}) {
    for (const std::string& line : {filler, digits, std::string(1 << 20, ' ')}) {
      const auto ended = ended_rank(begin + line + "\n" + kExited);
      ASSERT_TRUE(ended) << begin << line[0];
      // The digits are an exit status, if a long one.
      const bool is_status = begin.back() == ':' && line[0] == '9';
      EXPECT_EQ(ended->rank, is_status ? 2 : 12) << begin << line[0];
    }
  }
  const auto killed = ended_rank(filler + "process rank " + digits + " with PID 1 on " + kKilled);
  ASSERT_TRUE(killed);
  EXPECT_EQ(killed->rank, 1);
}

TEST(FailureReport, ARankThatFailedByItselfIsTheCause) {
  EXPECT_EQ(failure_report({failure(3, Kind::kPeerEnded, {1}, "the process of rank 1 has ended"),
                            failure(1, Kind::kOwn, {}, "no data file"),
                            failure(0, Kind::kHeard, {}, "rank 1 failed: no data file")},
                           ended(134, kAborted)),
            "smprun: first cause: rank 1: no data file\n");
}

TEST(FailureReport, AKilledRankIsTheCauseAndTheOneThatNoticedIsQuoted) {
  const std::string cause =
      "smprun: first cause: rank 1: was ended by signal 9 (Killed) and left no message\n";
  EXPECT_EQ(failure_report({}, ended(137, kKilled)), cause);
  EXPECT_EQ(failure_report({failure(3, Kind::kPeerEnded, {1}, "irecv failed"),
                            failure(0, Kind::kHeard, {3}, "rank 3 failed: irecv failed")},
                           ended(137, kKilled)),
            "smprun: noticed by rank 3: irecv failed\n" + cause);
}

TEST(FailureReport, ARankWhoseEndOnlyOthersSaw) {
  EXPECT_EQ(
      failure_report({failure(0, Kind::kPeerEnded, {2}, "irecv failed")}, ended(134, kAborted)),
      "smprun: noticed by rank 0: irecv failed\n"
      "smprun: first cause: rank 2: its process has ended and left no message\n");
}

TEST(FailureReport, TheChainOfWaitsEndsAtTheCause) {
  const std::string stopped =
      "did not come, and waited for no other rank: it is stopped, computes for longer than "
      "\"timeout_seconds\", or does not make the call\n";
  const Failure zero = failure(0, Kind::kTimedOut, {1}, "it waits for rank 1");
  const Failure one = failure(1, Kind::kHeard, {2}, "rank 0 failed: ...");
  EXPECT_EQ(
      failure_report({zero, one}, ended(134, kAborted)),
      "smprun: noticed by rank 0: it waits for rank 1\nsmprun: first cause: rank 2: " + stopped);
  // One that computes hears of it only when it communicates again.
  const Failure two = failure(2, Kind::kHeard, {}, "rank 0 failed: ...");
  EXPECT_EQ(
      failure_report({zero, one, two}, ended(134, kAborted)),
      "smprun: noticed by rank 0: it waits for rank 1\nsmprun: first cause: rank 2: " + stopped);
}

TEST(FailureReport, TheCauseThatWasSeenIsNamed) {
  Failure zero = failure(0, Kind::kTimedOut, {1}, "it waits for rank 1");
  zero.cause = core::StallCause{2, "is stopped; it has been in 1B0 of step 12 for 41 s"};
  EXPECT_EQ(failure_report({zero, failure(1, Kind::kHeard, {}, "rank 0 failed: ...")},
                           ended(134, kAborted)),
            "smprun: noticed by rank 0: it waits for rank 1\n"
            "smprun: first cause: rank 2: is stopped; it has been in 1B0 of step 12 for 41 s\n");
}

TEST(FailureReport, ACircleOfWaitsIsToldByWhoGaveUpFirst) {
  EXPECT_EQ(failure_report({failure(1, Kind::kTimedOut, {0}, "it waits for rank 0"),
                            failure(0, Kind::kHeard, {1}, "rank 1 failed: ...")},
                           ended(134, kAborted)),
            "smprun: first cause: rank 1: it waits for rank 0\n");
}

TEST(FailureReport, WithoutMessages) {
  EXPECT_EQ(failure_report({failure(0, Kind::kHeard, {1}, "rank 5 failed: disk full")}, ended(1)),
            "smprun: first cause: rank 0: rank 5 failed: disk full\n")
      << "of a rank of another host";
  EXPECT_EQ(failure_report({}, ended(3)),
            "smprun: first cause: no rank left a message; mpirun ended with exit status 3\n");
  ProcessResult stopped = ended(130);
  stopped.forwarded_signal = 2;
  EXPECT_EQ(failure_report({failure(0, Kind::kHeard, {}, "gone")}, stopped),
            "smprun: stopped by signal 2 (Interrupt)\n");
}

/// Killed by a user, or when memory runs out: ranks that notice are innocent.
TEST(FailureReport, AKilledMpirunIsTheCause) {
  ProcessResult result = ended(137);
  result.own_signal = 9;
  EXPECT_EQ(failure_report({failure(0, Kind::kPeerEnded, {1}, "irecv failed")}, result),
            "smprun: first cause: mpirun was ended by signal 9 (Killed)\n");
  EXPECT_EQ(failure_report({failure(1, Kind::kOwn, {}, "no data file")}, result),
            "smprun: first cause: rank 1: no data file\n");
}

TEST(FailureReport, WhatTheLauncherHasEnded) {
  ProcessResult result = ended(143);
  result.ended_because = "rank 1 has not come";
  EXPECT_EQ(failure_report({failure(0, Kind::kOwn, {}, "a consequence")}, result),
            "smprun: first cause: rank 1 has not come\n");
  result.forwarded_signal = 15;
  EXPECT_EQ(failure_report({}, result),
            "smprun: stopped by signal 15 (Terminated): rank 1 has not come\n");
}

}  // namespace
}  // namespace smp::tools
