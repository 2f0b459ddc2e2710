// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <future>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/command.h"

namespace {

using smp::testing::kNoFarewell;
using smp::testing::Outcome;
using smp::testing::run_command;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kParameters = R"({"partitions": 2, "microbatches": 2})";

/// The command that runs the failing program on two stages through the launcher.
std::string launch(const std::string& how, const std::string& parameters,
                   const std::string& log_level = "error") {
  const std::string config = ::testing::TempDir() + "failure_" + how + ".json";
  std::ofstream(config) << parameters;
  return "SMP_LOG_LEVEL=" + log_level + " tools/smprun_bin --config " + config +
         " --np 2 tests/failure/failing_step " + how;
}

std::string job(const std::string& how) { return launch(how, kParameters) + " 2>&1"; }

/// Where all ranks fail in the same way, or the other one says nothing any more.
std::string job_without_farewell(const std::string& how) { return kNoFarewell + job(how); }

/// Jobs wait for most of their time: where all tests run, three at a time go beside the tests, in
/// the order of these.
class Failure : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    const auto& unit = *::testing::UnitTest::GetInstance();
    if (unit.test_to_run_count() < unit.total_test_count()) return;
    std::vector<std::pair<std::string, std::string>> jobs;  // names and commands
    for (const char* how :
         {"nothing", "last_words", "fork", "exception", "caught", "caught_outside", "saves_alone",
          "ends_early", "kill", "caught_barrier", "exit", "libtorch"}) {
      jobs.emplace_back(how, job(how));
    }
    for (const char* how : {"item", "two_batches", "other_batch", "loss_weight", "other_model",
                            "stop", "busy", "stop_at_end", "closes_files"}) {
      jobs.emplace_back(how, job_without_farewell(how));
    }
    constexpr size_t kLanes = 3;
    for (size_t i = 0; i < jobs.size(); ++i) {
      const auto before = i < kLanes ? Future() : begun_.at(jobs[i - kLanes].first);
      begun_[jobs[i].first] = std::async(std::launch::async, [before, command = jobs[i].second] {
        if (before.valid()) before.wait();
        return run_command(command);
      });
    }
  }

  static Outcome run(const std::string& how) {
    const auto begun = begun_.find(how);
    return begun == begun_.end() ? run_command(job(how)) : begun->second.get();
  }
  static Outcome run_without_farewell(const std::string& how) {
    const auto begun = begun_.find(how);
    return begun == begun_.end() ? run_command(job_without_farewell(how)) : begun->second.get();
  }

 private:
  using Future = std::shared_future<Outcome>;
  static std::map<std::string, Future> begun_;  // under the names of jobs
};

std::map<std::string, Failure::Future> Failure::begun_;

/// Starting two processes that load libtorch takes some seconds on a busy machine; the limit of
/// ten holds from the failure on.
constexpr double kSeconds = 60;

/// One report, whatever the number of ranks that it ended; beside the program's output.
void expect_short(const Outcome& outcome) {
  std::istringstream lines(outcome.output);
  int count = 0;
  for (std::string line; std::getline(lines, line);) count += line.rfind("caught: ", 0) != 0;
  EXPECT_LT(count, 15) << outcome.output;
}

void expect_failure(const Outcome& outcome, const std::string& cause) {
  EXPECT_NE(outcome.status, 0) << outcome.output;
  EXPECT_LT(outcome.seconds, kSeconds) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr(cause));
  const size_t verdict = outcome.output.rfind("smprun: first cause: ");
  ASSERT_NE(verdict, std::string::npos) << outcome.output;
  EXPECT_NE(outcome.output.find(cause, verdict), std::string::npos)
      << "the first cause is not what smprun prints last:\n"
      << outcome.output;
  expect_short(outcome);
}

TEST_F(Failure, NothingFailsWithoutACause) {
  const Outcome outcome = run("nothing");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
}

/// Standard output is a pipe, which holds back output until it is flushed.
TEST_F(Failure, ExitWithoutFlushingLosesNoOutput) {
  const Outcome outcome = run("last_words");
  EXPECT_NE(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("last words of 1\n"));
}

TEST_F(Failure, ForkedProcessesDoNotEndTheJob) {
  const Outcome outcome = run("fork");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("forked, status 3"));
  EXPECT_THAT(outcome.output, HasSubstr("forked, signal 6"));
  EXPECT_THAT(outcome.output, Not(HasSubstr("first cause")));
}

TEST_F(Failure, UncaughtExceptionAfterASecondInit) {
  const Outcome outcome = run_command("timeout 60 tests/failure/failing_step init_again 2>&1");
  EXPECT_EQ(outcome.status, 128 + 6) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("nobody catches this"));
}

TEST_F(Failure, ExceptionInTheUsersFunction) {
  expect_failure(run("exception"), "rank 1: the user's function failed");
}

TEST_F(Failure, ExceptionThatTheProgramCatches) {
  expect_failure(run("caught"), "rank 1: the user's function failed");
}

/// The program ends, the others must not wait for it.
TEST_F(Failure, ExceptionOutsideAStepThatTheProgramCatches) {
  expect_failure(run("caught_outside"), "rank 1: the program ended with exit status 1");
}

TEST_F(Failure, ReadingDataInsideAStep) {
  expect_failure(run_without_farewell("item"), "operator aten::item");
}

TEST_F(Failure, InputsOfTwoBatches) {
  expect_failure(run_without_farewell("two_batches"), "they must be of one batch");
}

TEST_F(Failure, OtherBatchOnOneRank) {
  expect_failure(run_without_farewell("other_batch"), "was given different batches");
}

TEST_F(Failure, OtherLossWeightOnOneRank) {
  expect_failure(run_without_farewell("loss_weight"),
                 "has other constants on pp rank 0 and pp rank 1");
}

TEST_F(Failure, OtherModelOnOneRank) {
  expect_failure(run_without_farewell("other_model"),
                 "the model differs between ranks: rank 0 has ");
}

/// `if (smp::rank() == 0) smp::save(...)`.
TEST_F(Failure, OneRankThatSaves) {
  expect_failure(
      run("saves_alone"),
      "rank 0 is in smp::save, rank 1 is in call 2 of step function \"train\". All ranks "
      "must make the same calls in the same order");
}

TEST_F(Failure, RankThatEndsItsProgramEarly) {
  expect_failure(run("ends_early"),
                 "rank 0 is in call 1 of step function \"train\", rank 1 is in smp::shutdown, as "
                 "its program has ended. All ranks must make the same calls");
}

/// Rank 1 waits in a handler that runs after its thread's objects have been destroyed.
TEST_F(Failure, OneRankThatStepsAtTheEnd) {
  const Outcome outcome = run_command(
      launch("steps_at_end", R"({"partitions": 2, "microbatches": 2, "stall_seconds": 0.5})",
             "warning") +
      " 2>&1");
  EXPECT_NE(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.output, ::testing::ContainsRegex(
                                  "\\[smp rank [01] pp [01]/2\\] warning: rank [01] has waited for "
                                  "\"stall_seconds\""));
  EXPECT_THAT(outcome.output,
              ::testing::ContainsRegex(
                  "smprun: first cause: rank 0: .* in call 5 of step function \"train\" was not "
                  "complete within the timeout of 3 s; it waits for rank 1\\. The chain of waits: "
                  "rank 0 waits for rank 1 in all_gather of train\\(\\), which waits for rank 0 in "
                  "[^:]*smp::shutdown: a circle, as of calls that do not match"));
}

TEST_F(Failure, RankThatIsKilled) {
  const Outcome outcome = run("kill");
  EXPECT_NE(outcome.status, 0);
  EXPECT_LT(outcome.seconds, kSeconds);
  EXPECT_THAT(outcome.output,
              HasSubstr("smprun: first cause: rank 1: was ended by signal 9 (Killed) and "
                        "left no message\n"));
  expect_short(outcome);
}

/// Outside of a step the other one's program catches that, and ends with a status of its own.
TEST_F(Failure, RankThatIsKilledWhereTheOtherCatchesIt) {
  expect_failure(run("caught_barrier"),
                 "rank 1: was ended by signal 9 (Killed) and left no message");
}

/// A library ends the process in the middle of training, with nothing said.
TEST_F(Failure, RankThatExits) {
  expect_failure(run("exit"), "rank 1: ended with exit status 7 and left no message");
}

/// The other rank waits for it, and is innocent.
TEST_F(Failure, RankThatIsStopped) {
  expect_failure(run_without_farewell("stop"),
                 "rank 1: is stopped; it has been in the user's code after step 1 for ");
}

/// Slow, and not dead.
TEST_F(Failure, RankThatComputesForLongerThanTheTimeOut) {
  const Outcome outcome = run_without_farewell("busy");
  EXPECT_NE(outcome.status, 0);
  EXPECT_THAT(
      outcome.output,
      ::testing::ContainsRegex(
          "smprun: first cause: rank 1: computes; it has been in the user's code after step "
          "1 for [0-9.]+ s, and is in .*train < main\n"));
  expect_short(outcome);
}

/// Without the parts that differ from run to run.
std::string normal(const std::string& text) {
  const auto replaced = [](const std::string& in, const char* what, const char* by) {
    return std::regex_replace(in, std::regex(what), by);
  };
  std::string result = replaced(text, "[0-9.]+ (s|min|h)\\b", "T");
  result = replaced(result, " [0-9]{2,}", " PID");
  result = replaced(result, "(\\n +[01]) +[0-9]+", "$1 PID");  // in the table
  return replaced(result, " +", " ");
}

/// Another shell sees the rank that holds the job up, the job warns of it once, and goes on when it
/// can.
TEST_F(Failure, StatusAndWarningOfARankThatIsStopped) {
  const std::string folder = ::testing::TempDir() + "failure_stall";
  const std::string parameters = R"({"partitions": 2, "microbatches": 2, "stall_seconds": 0.5})";
  const std::string script = "mkdir -p '" + folder + "'; folder='" + folder + "'\n" +
                             "export SMP_JOB_ID=stall-$$\n" +
                             launch("pause", parameters, "warning") + R"sh( >"$folder/log" 2>&1 &
    job=$!
    warning() { grep -A 6 'stall_seconds' "$folder/log" | grep -B 6 'rank 1: stopped'; }
    for i in $(seq 600); do warning >/dev/null && break; sleep 0.1; done
    tools/smprun_bin --status $SMP_JOB_ID >"$folder/status"
    sed "s/$SMP_JOB_ID/stall/" "$folder/status"
    echo "other: $(tools/smprun_bin --status none 2>&1)"
    kill -CONT $(sed -n 's/^ *1  *\([0-9]*\) .*/\1/p' "$folder/status")
    wait $job
    echo "ended with $?"
    grep -c 'rank 1: stopped' "$folder/log"
    tools/smprun_bin --status $SMP_JOB_ID 2>&1 | sed "s/$SMP_JOB_ID/stall/"
  )sh";
  EXPECT_EQ(normal(run_command(script).output),
            "job stall: failing_step, 2 ranks, for T\n"
            " rank process step does for waits for state\n"
            " 0 PID 2 train() T rank 1, T waits\n"
            " 1 PID 1 user's code T stopped\n"
            "rank 0 waits for rank 1 in all_gather of train(), which has been in the user's code "
            "after step 1 for T (rank 1: stopped)\n"
            "other: smprun: no job none of this user runs on this host.\n"
            "ended with 0\n"
            "1\n"
            "smprun: no job stall of this user runs on this host.\n");
}

/// After the last step, where no rank waits but for the end of the job.
TEST_F(Failure, RankThatIsStoppedAtTheEnd) {
  const Outcome outcome = run_without_farewell("stop_at_end");
  EXPECT_THAT(outcome.output,
              HasSubstr("was not complete within the timeout of 2 s; it waits for rank 1."));
  EXPECT_THAT(
      outcome.output,
      HasSubstr("[at the end of the program, where all ranks wait for each other]\n"
                "smprun: first cause: rank 1: is stopped; it has been in the user's code after "
                "step 4 for "));
  EXPECT_NE(outcome.status, 0);
}

/// Closes them like a daemon, with MPI's among them, for which MPI_Finalize waits for ever.
TEST_F(Failure, RankThatClosesAllDescriptors) {
  expect_failure(run_without_farewell("closes_files"),
                 "MPI has not ended within 12 s: all ranks have come to the end");
}

/// Which c10 throws, with a backtrace of its own.
TEST_F(Failure, ExceptionOfLibtorch) {
  // Newer ones begin with "mm: ".
  expect_failure(run("libtorch"), "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)\n");
}

/// The beginning of a script: a job whose two ranks have started and are idle, $launcher, and the
/// function `ranks`, which prints their process numbers.
std::string idle_job() {
  const std::string log = ::testing::TempDir() + "failure_idle.log";
  return "log='" + log + "'\n: >\"$log\"\n" + launch("idle", kParameters) + R"sh( >"$log" 2>&1 &
    launcher=$!
    ranks() { sed -n 's/^rank pid //p' "$log"; }
    until [ "$(ranks | wc -l)" -eq 2 ]; do sleep 0.1; done
  )sh";
}

/// Nothing can catch that signal, and still no rank is left.
TEST_F(Failure, LauncherThatIsKilled) {
  const std::string script = idle_job() + R"sh(
    kill -9 $launcher
    alive() { for rank in $(ranks); do kill -0 $rank 2>/dev/null && echo "$rank is alive"; done; }
    for i in $(seq 600); do [ -z "$(alive)" ] && break; sleep 0.1; done
    echo "$(ranks | wc -l) ranks had started"
    alive
  )sh";
  EXPECT_EQ(run_command(script).output, "2 ranks had started\n");
}

/// Ranks on one host need no network. mpirun itself has a port on all interfaces (SECURITY.md), and
/// one on the loopback, by which the test knows that it finds ports.
TEST_F(Failure, RanksOnOneHostListenToNoOther) {
  const std::string script = idle_job() + R"sh(
    addresses() {
      sockets=$(for file in /proc/$1/fd/*; do readlink "$file"; done | tr -dc '0-9\n' | tr '\n' ' ')
      awk -v sockets=" $sockets" '$4 == "0A" && index(sockets, " " $10 " ") {
        sub(/:.*/, "", $2); print $2 }' /proc/$1/net/tcp /proc/$1/net/tcp6
    }
    elsewhere() { addresses $1 | grep -v -e '^0100007F$' -e '^00000000000000000000000001000000$'; }
    for process in $launcher $(ranks); do elsewhere $process; done
    addresses $(cat /proc/$launcher/task/*/children) | grep 0100007F
    kill $launcher
    wait $launcher
  )sh";
  EXPECT_EQ(run_command(script).output, "0100007F\n");
}

/// The launcher finds out before it starts anything.
TEST_F(Failure, PartitionsThatDoNotDivideTheWorld) {
  const Outcome outcome =
      run_command(launch("nothing", R"({"partitions": 3, "microbatches": 2})") + " 2>&1");
  EXPECT_NE(outcome.status, 0);
  EXPECT_THAT(outcome.output,
              HasSubstr("config key \"partitions\": expected a divisor of the world size "
                        "(2), got 3. Set it to 1 or 2"));
}

}  // namespace
