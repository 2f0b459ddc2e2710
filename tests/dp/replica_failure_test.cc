// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "tests/command.h"

namespace smp::testing {
namespace {

/// Runs the failing program on two replicas through the launcher.
Outcome run(const std::string& how) {
  const std::string config = ::testing::TempDir() + "replica_" + how + ".json";
  std::ofstream(config) << R"({"partitions": 1, "ddp": true})";
  return run_command("tools/smprun_bin --config " + config + " --np 2 tests/dp/failing_replica " +
                     how + " 2>&1");
}

/// Starting two processes that load libtorch takes some seconds on a busy machine. Ranks that no
/// one ends wait for five minutes.
constexpr double kSeconds = 120;

void expect_failure(const std::string& how, const std::vector<std::string>& parts) {
  const Outcome outcome = run(how);
  EXPECT_NE(outcome.status, 0) << outcome.output;
  EXPECT_LT(outcome.seconds, kSeconds) << outcome.output;
  for (const std::string& part : parts) {
    EXPECT_NE(outcome.output.find(part), std::string::npos) << part << "\n" << outcome.output;
  }
}

TEST(ReplicaFailure, NothingFailsWithoutACause) {
  const Outcome outcome = run("nothing");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
}

TEST(ReplicaFailure, RankThatIsKilled) {
  expect_failure("kill",
                 {"first cause: rank 1: was ended by signal 9 (Killed) and left no message"});
}

TEST(ReplicaFailure, ExceptionOfOneRank) {
  expect_failure("exception", {"smprun: first cause: rank 1: no data file"});
}

/// A rank that waits says for which rank, in which operation and for which bucket.
TEST(ReplicaFailure, RankThatStalls) {
  expect_failure("stall", {"smprun: noticed by rank 0: [smp rank 0 dp 0/2] all_reduce of ",
                           "it waits for rank 1", "smprun: first cause: rank 1: sleeps",
                           "; it has been in the user's code for ",
                           "while DistributedDataParallel reduced bucket 1 of 2: bias"});
}

TEST(ReplicaFailure, AnotherNumberOfBatches) {
  expect_failure("batches", {"it waits for rank 1",
                             "If the ranks have different numbers of batches, drop the surplus"});
}

}  // namespace
}  // namespace smp::testing
