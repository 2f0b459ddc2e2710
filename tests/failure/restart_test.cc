// SPDX-License-Identifier: Apache-2.0
// Jobs that smprun starts again after a rank has died.

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <future>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/checkpoint/content.h"
#include "tests/command.h"

namespace smp::testing {
namespace {

using Lines = std::vector<std::string>;

/// A folder in which jobs run.
class Jobs {
 public:
  explicit Jobs(const std::string& name) : folder_(::testing::TempDir() + name) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    configure("");
  }

  const std::string& folder() const { return folder_; }

  /// Adds to the configuration.
  void configure(const std::string& parameters) const {
    std::ofstream(folder_ + "/smp.json")
        << R"({"partitions": 2, "microbatches": 2, "ddp": true)" << parameters << "}";
  }

  /// A job that saves into `run`. `variables` as a shell sets them before a command.
  Outcome run(const std::string& restarts, const std::string& marks,
              const std::string& variables = kNoFarewell) const {
    return run_command("cd " + folder_ + " && " + variables + " " + launcher_ +
                       " --config smp.json --np 4 " + restarts + " " + program_ + " run " + marks +
                       " 2>&1");
  }

 private:
  const std::string folder_;
  const std::string launcher_ = std::filesystem::absolute("tools/smprun_bin");
  const std::string program_ = std::filesystem::absolute("tests/failure/restarting_step");
};

class Restarts : public ::testing::Test {
 protected:
  /// A job that nothing disturbs, for all tests; and beside the first tests go those jobs that do
  /// little but wait for their next start.
  static void SetUpTestSuite() {
    const Jobs jobs("undisturbed");
    undisturbed_ = jobs.folder() + "/run";
    const Outcome outcome = jobs.run("", "");
    ASSERT_EQ(outcome.status, 0) << outcome.output;
    ASSERT_EQ(told(outcome.output), Lines{});
    computing_ =
        begin("computing", "", "--restarts 9",
              "action:3:1:2 update:1:3 save:0:3:2 begin:2 action:2:5:0 end:1", /*variables=*/"");
    returning_ =
        begin("returning", "", "--restarts 9", "throw:1:3 throw:1:3 throw:1:3 throw:1:3 throw:1:3");
    not_met_ = begin("not_met", R"(, "recovery": "shrink", "recovery_interval": 1)", "",
                     "early:1 action:1:2:0 early:0");
    limited_ = begin("limited", "", "--restarts 1", "begin:1 begin:2 begin:3");
  }

  static std::shared_future<Outcome> begin(const std::string& name, const std::string& parameters,
                                           const std::string& restarts, const std::string& marks,
                                           const std::string& variables = kNoFarewell) {
    return std::async(std::launch::async, [=] {
      const Jobs jobs(name);
      jobs.configure(parameters);
      return jobs.run(restarts, marks, variables);
    });
  }

  /// The lines about restarts, from the launcher and the ranks.
  static Lines told(const std::string& output) {
    // How it ended is known from mpirun or, if another rank ended before mpirun looked, from that.
    static const std::regex without_message("(rank [0-9]+): .* and left no message");
    Lines lines;
    std::istringstream stream(output);
    for (std::string line; std::getline(stream, line);) {
      const size_t logged = line.find("] restart ");
      if (logged != std::string::npos) {
        lines.push_back(line.substr(logged + 2));
      } else if (line.rfind("smprun: ", 0) == 0 && line.rfind("smprun: noticed", 0) != 0) {
        lines.push_back(std::regex_replace(line.substr(8), without_message, "$1 died"));
      }
    }
    return lines;
  }

  /// The last saves of a job and of the undisturbed one.
  static void expect_same_end(const std::string& folder) {
    for (const char* name : {"/step_8_partial", "/step_6_partial"}) {
      EXPECT_EQ(content_of(folder + "/run" + name), content_of(undisturbed_ + name)) << name;
    }
  }

  void expect_same_end() const { expect_same_end(jobs_.folder()); }

  static std::string undisturbed_;  // its checkpoints
  static std::shared_future<Outcome> computing_, returning_, not_met_, limited_;
  const Jobs jobs_{"restarts"};
};

std::string Restarts::undisturbed_;
std::shared_future<Outcome> Restarts::computing_, Restarts::returning_, Restarts::not_met_,
    Restarts::limited_;

std::string died(int rank) { return "first cause: rank " + std::to_string(rank) + " died"; }

/// The steps from which a job went on, as it says itself.
std::vector<int> resumed_steps(const std::string& output) {
  static const std::regex line("restart [0-9]+: goes on from step ([0-9]+)");
  std::vector<int> steps;
  for (std::sregex_iterator it(output.begin(), output.end(), line), end; it != end; ++it) {
    steps.push_back(std::stoi((*it)[1]));
  }
  return steps;
}

/// The last copy of a rank that dies may still be under way; the one before is complete.
void expect_resumed_from(const std::string& output, const std::vector<int>& steps_of_deaths) {
  const auto steps = resumed_steps(output);
  ASSERT_EQ(steps.size(), steps_of_deaths.size()) << output;
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_LE(steps[i], steps_of_deaths[i]) << output;
    EXPECT_GE(steps[i], steps_of_deaths[i] - 1) << output;
  }
}

/// The number of restarts is not given. A rank dies in a step, before its update, while it keeps a
/// copy (rank 0 begins, writes and ends one by some ten calls), and is stopped.
TEST_F(Restarts, GoOnFromTheCopyInMemory) {
  jobs_.configure(R"(, "recovery": "restart", "recovery_interval": 1)");
  const Outcome outcome = jobs_.run("", "action:3:2:2 update:1:3 copy:0:3:2 copy:0:4:8 stop:2:6");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  expect_resumed_from(outcome.output, {2, 3, 3, 4, 6});
  EXPECT_NE(outcome.output.find("smprun: first cause: rank 2: is stopped"), std::string::npos)
      << outcome.output;
  EXPECT_NE(outcome.output.find("smprun: restart 1 in 0 s: from the copy in memory, of step "),
            std::string::npos)
      << outcome.output;
  expect_same_end();
}

/// Launcher, mpirun and ranks: no time of one is compared with that of another, and no wait is
/// measured by a clock that can be set.
TEST_F(Restarts, GoOnWhereWallClocksDifferAndStep) {
  const std::string preload =
      " LD_PRELOAD=" + std::filesystem::absolute("tests/libwall_clocks.so").string() + " ";
  const auto steps =
      run_command(preload + "python3 -c 'import time as t; print(t.time() - t.time())'");
  ASSERT_GT(std::abs(std::stod(steps.output)), 3600) << "two times in a row";
  jobs_.configure(R"(, "recovery": "restart", "recovery_interval": 1)");
  const Outcome outcome = jobs_.run("", "action:3:2:2 stop:2:4", kNoFarewell + preload);
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  expect_resumed_from(outcome.output, {2, 4});
  EXPECT_NE(outcome.output.find("smprun: first cause: rank 2: is stopped"), std::string::npos)
      << outcome.output;
  expect_same_end();
}

TEST_F(Restarts, GoOnWithFewerRanks) {
  jobs_.configure(R"(, "recovery": "shrink", "recovery_interval": 2)");
  const Outcome outcome = jobs_.run("", "begin:1 action:1:2:0 update:0:5");
  EXPECT_NE(outcome.status, 0);
  EXPECT_NE(outcome.output.find("smprun: goes on with 2 ranks: 2 stages x 1 replica, 4 "
                                "microbatches\n"),
            std::string::npos)
      << outcome.output;
  EXPECT_NE(outcome.output.find("smprun: goes on with 1 rank: 1 stage x 1 replica, 4 "
                                "microbatches\n"),
            std::string::npos)
      << outcome.output;
  EXPECT_EQ(told(outcome.output).back(),
            "not started again: no layout with fewer ranks computes the same.")
      << outcome.output;
  const Outcome enough = jobs_.run("", "action:3:2:1 update:1:5");
  EXPECT_EQ(enough.status, 0) << enough.output;
  expect_same_end();
}

/// A rank that ends before all have met says nothing of its host: all ranks are started again.
TEST_F(Restarts, WithAllRanksWhereTheyHaveNotMet) {
  const Outcome& outcome = not_met_.get();
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  const Lines expected = {
      died(1),
      "restart 1 in 2 s: from its start, no checkpoint is complete",
      "restart 1: goes on from step 0; 0 steps are trained again",
      died(1),
      "restart 2 in 0 s: from the copy in memory, of step N",  // one or two: see above
      "goes on with 2 ranks: 2 stages x 1 replica, 4 microbatches",
      died(0),
      "restart 3 in 2 s: from the copy in memory, of step N",
      "restart 3: goes on from step N",
  };
  static const std::regex step("step [12](; .*)?$");
  Lines got;
  for (const std::string& line : told(outcome.output)) {
    got.push_back(std::regex_replace(line, step, "step N"));
  }
  EXPECT_EQ(got, expected) << outcome.output;
}

/// Other ranks have a second to report, before mpirun ends them. A rank dies in a step, between a
/// step and its update, in a save, at the start and at the end.
TEST_F(Restarts, ComputeWhatAnUndisturbedJobComputes) {
  const Outcome& outcome = computing_.get();
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  const Lines expected = {
      died(3),
      "restart 1 of 9 in 2 s: from its start, no checkpoint is complete",
      "restart 1: goes on from step 0; 1 step is trained again",
      died(1),
      "restart 2 of 9 in 1 s: from checkpoint run/step_2_partial",
      "restart 2: goes on from step 2; 2 steps are trained again",
      died(0),
      "restart 3 of 9 in 2 s: from checkpoint run/step_2_partial",
      died(2),
      "restart 4 of 9 in 4 s: from checkpoint run/step_2_partial",
      "restart 4: goes on from step 2; 2 steps are trained again",
      died(2),
      "restart 5 of 9 in 1 s: from checkpoint run/step_4_partial",
      "restart 5: goes on from step 4; 1 step is trained again",
      died(1),
      "restart 6 of 9 in 1 s: from checkpoint run/step_8_partial",
  };
  EXPECT_EQ(told(outcome.output), expected) << outcome.output;
  expect_same_end(::testing::TempDir() + "computing");
}

TEST_F(Restarts, EndWhereAFailureComesBack) {
  const Outcome& outcome = returning_.get();
  EXPECT_NE(outcome.status, 0);
  Lines expected = {"first cause: rank 1: no such word"};
  for (const char* const start : {"1 of 9 in 1 s", "2 of 9 in 2 s", "3 of 9 in 4 s"}) {
    const std::string restart = std::string("restart ") + start;
    expected.push_back(restart + ": from checkpoint run/step_2_partial");
    expected.push_back(restart.substr(0, 9) + ": goes on from step 2; 1 step is trained again");
    expected.push_back("first cause: rank 1: no such word");
  }
  expected.push_back("not started again: 3 starts in a row have come no further than step 3.");
  EXPECT_EQ(told(outcome.output), expected) << outcome.output;
}

/// A rank gets SIGTERM in the middle of a step; the job stops after it, and another goes on.
TEST_F(Restarts, AreNotForJobsThatStopWhenTheyAreAsked) {
  jobs_.configure(R"(, "preempt_seconds": 200)");
  const Outcome asked = jobs_.run("--restarts 9", "asked:2:3:1");
  EXPECT_EQ(asked.status, 75) << asked.output;
  EXPECT_EQ(told(asked.output), Lines{"preempted: checkpoint run/asked_partial of step 4"})
      << asked.output;
  EXPECT_EQ(asked.output.find("first cause"), std::string::npos) << asked.output;
  const Outcome next = jobs_.run("", "", "RESUME=1");
  EXPECT_EQ(next.status, 0) << next.output;
  expect_same_end();
}

TEST_F(Restarts, AreNotMoreThanWasSaid) {
  const Outcome& outcome = limited_.get();
  EXPECT_EQ(outcome.status, 128 + 9) << outcome.output;
  const Lines expected = {
      died(1),
      "restart 1 of 1 in 2 s: from its start, no checkpoint is complete",
      died(2),
      "not started again: all of --restarts 1 are used.",
  };
  EXPECT_EQ(told(outcome.output), expected) << outcome.output;
}

}  // namespace
}  // namespace smp::testing
