#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace {

struct Outcome {
  int status;
  double seconds;
  std::string output;
};

/// Runs the failing program on two replicas through the launcher.
Outcome run(const std::string& how) {
  const std::string config = ::testing::TempDir() + "replica_" + how + ".json";
  std::ofstream(config) << R"({"partitions": 1, "ddp": true, "timeout_seconds": 4})";
  const std::string command =
      "tools/smprun_bin --config " + config + " --np 2 tests/dp/failing_replica " + how + " 2>&1";
  const auto start = std::chrono::steady_clock::now();
  FILE* pipe = popen(command.c_str(), "r");
  Outcome outcome;
  std::array<char, 4096> buffer;
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) outcome.output += buffer.data();
  const int status = pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  const auto end = std::chrono::steady_clock::now();
  outcome.seconds = std::chrono::duration<double>(end - start).count();
  return outcome;
}

/// Starting two processes that load libtorch takes some seconds on a busy machine.
constexpr double kSeconds = 30;

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

TEST(ReplicaFailure, RankThatIsKilled) { expect_failure("kill", {"signal 9"}); }

TEST(ReplicaFailure, ExceptionOfOneRank) {
  expect_failure("exception", {"smprun: first cause: rank 1: no data file"});
}

/// Whoever waits says for whom, in which operation and for which bucket.
TEST(ReplicaFailure, RankThatStalls) {
  expect_failure("stall", {"smprun: first cause: rank 0: [smp rank 0 dp 0/2] all_reduce of ",
                           "it waits for rank 1",
                           "while DistributedDataParallel reduced bucket 1 of 2: bias"});
}

TEST(ReplicaFailure, AnotherNumberOfBatches) {
  expect_failure("batches", {"it waits for rank 1",
                             "If the ranks have different numbers of batches, drop the surplus"});
}

}  // namespace
