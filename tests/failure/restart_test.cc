// SPDX-License-Identifier: Apache-2.0
// Jobs that smprun starts again after a rank has died.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "tests/command.h"

namespace smp::testing {
namespace {

using checkpoint::Reader;
using Lines = std::vector<std::string>;

class Restarts : public ::testing::Test {
 protected:
  Restarts() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    std::ofstream(config_) << R"({"partitions": 2, "microbatches": 2, "ddp": true})";
  }

  Outcome run(const std::string& folder, const std::string& restarts, const std::string& marks) {
    return run_command("cd " + folder_ + " && " + launcher_ + " --config " + config_ + " --np 4 " +
                       restarts + " " + program_ + " " + folder + " " + marks + " 2>&1");
  }

  /// The lines that say of restarts, by whomever.
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

  const std::string folder_ = ::testing::TempDir() + "restarts";
  const std::string config_ = ::testing::TempDir() + "restarts.json";
  const std::string launcher_ = std::filesystem::absolute("tools/smprun_bin");
  const std::string program_ = std::filesystem::absolute("tests/failure/restarting_step");
};

std::string died(int rank) { return "first cause: rank " + std::to_string(rank) + " died"; }

/// A rank dies in a step, between a step and its update, in a save, at the start and at the end.
TEST_F(Restarts, ComputeWhatAnUndisturbedJobComputes) {
  const Outcome undisturbed = run("undisturbed", "", "");
  ASSERT_EQ(undisturbed.status, 0) << undisturbed.output;
  EXPECT_EQ(told(undisturbed.output), Lines{});

  const Outcome outcome =
      run("run", "--restarts 9", "action:3:1:2 update:1:3 save:0:3:2 begin:2 action:2:5:0 end:1");
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
  for (const char* name : {"/step_8_partial", "/step_6_partial"}) {
    Reader whole(folder_ + "/run" + name), other(folder_ + "/undisturbed" + name);
    EXPECT_TRUE(whole.find_damage(Reader::Section::kAll).empty());
    // With the hashes of all tensors.
    EXPECT_EQ(whole.index().to_text(), other.index().to_text()) << name;
  }
}

TEST_F(Restarts, EndWhereAFailureComesBack) {
  const Outcome outcome = run("run", "--restarts 9", "throw:1:3 throw:1:3 throw:1:3");
  EXPECT_NE(outcome.status, 0);
  const Lines expected = {
      "first cause: rank 1: no such word",
      "restart 1 of 9 in 1 s: from checkpoint run/step_2_partial",
      "restart 1: goes on from step 2; 1 step is trained again",
      "first cause: rank 1: no such word",
      "not started again: it has failed twice with this cause, after step 3.",
  };
  EXPECT_EQ(told(outcome.output), expected) << outcome.output;
}

/// As by an argument that the program does not know.
TEST_F(Restarts, EndWhereAProgramDoesNotBegin) {
  const Outcome outcome = run("run", "--restarts 9", "early:1 early:1 early:1");
  EXPECT_EQ(outcome.status, 3) << outcome.output;
  const Lines expected = {
      died(1),
      "restart 1 of 9 in 2 s: from its start, no checkpoint is complete",
      died(1),
      "not started again: it has failed twice with this cause, before its first step.",
  };
  EXPECT_EQ(told(outcome.output), expected) << outcome.output;
}

TEST_F(Restarts, AreNotMoreThanWasSaid) {
  const Outcome outcome = run("run", "--restarts 1", "begin:1 begin:2 begin:3");
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
