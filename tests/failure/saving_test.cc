// SPDX-License-Identifier: Apache-2.0
// Saves in the background on ranks that are processes, and the files left when one of them dies.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "checkpoint/reader.h"
#include "tests/command.h"

namespace smp::testing {
namespace {

using checkpoint::Reader;

class Saving : public ::testing::Test {
 protected:
  Saving() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    configure("");
  }

  /// Adds to the configuration.
  void configure(const std::string& parameters) const {
    std::ofstream(config_) << R"({"partitions": 2, "microbatches": 2)" << parameters << "}";
  }

  Outcome run(const std::string& mode = "") const {
    return run_command("tools/smprun_bin --config " + config_ +
                       " --np 2 tests/failure/saving_step " + folder_ + " " + mode + " 2>&1");
  }

  /// Which save is there, whole.
  int saved() const {
    Reader reader(folder_ + "/a");
    EXPECT_TRUE(reader.find_damage(Reader::Section::kAll).empty());
    return reader.index().run.user_content.at("save");
  }

  const std::string folder_ = ::testing::TempDir() + "saving";
  const std::string config_ = ::testing::TempDir() + "saving.json";
};

TEST_F(Saving, GoesOnBesideTraining) {
  const Outcome outcome = run();
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_EQ(saved(), 2);
  // Their indices hold the hashes of all tensors. A job has one plan: the same ranks wrote them.
  EXPECT_EQ(Reader(folder_ + "/a").index().to_text(),
            Reader(folder_ + "/expected").index().to_text());
}

/// At the first call of a file, in the middle of one and between two.
TEST_F(Saving, RankThatIsKilledLeavesTheEarlierCheckpoint) {
  for (const char* mode : {"kill 0", "kill 2", "kill 6"}) {
    SCOPED_TRACE(mode);
    const Outcome outcome = run(mode);
    EXPECT_NE(outcome.status, 0) << outcome.output;
    EXPECT_NE(outcome.output.find("signal 9"), std::string::npos) << outcome.output;
    EXPECT_EQ(saved(), 1);
  }
  const Outcome again = run();  // the remains of the others are no hindrance
  EXPECT_EQ(again.status, 0) << again.output;
  EXPECT_EQ(saved(), 2);
}

/// While the other waits for the save, and for nothing else. The limit holds for the whole job,
/// and a busy machine may stop for some seconds.
TEST_F(Saving, RankThatStopsInItIsNamed) {
  configure(R"(, "timeout_seconds": 15, "stall_seconds": 1)");
  const Outcome outcome = run("stop 2");
  EXPECT_NE(outcome.status, 0) << outcome.output;
  for (const char* text :
       {"warning: rank 0 has waited for \"stall_seconds\" (1 s), and waits on:",
        "rank 0 waits for rank 1 in all_gather of smp::SaveHandle::wait, which has been in ",
        "was not complete within the timeout of 15 s; it waits for rank 1.",
        "smprun: first cause: rank 1: is stopped; it has been in "}) {
    EXPECT_NE(outcome.output.find(text), std::string::npos) << text << "\n" << outcome.output;
  }
  EXPECT_EQ(saved(), 1);
}

/// Training goes on, the copy before stays, and is replaced when there is room again.
TEST_F(Saving, CopyInMemoryForWhichThereIsNoRoom) {
  configure(R"(, "recovery": "restart", "recovery_interval": 1)");
  const Outcome outcome = run("full");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  std::string said, warnings;
  std::istringstream lines(outcome.output);
  for (std::string line; std::getline(lines, line);) {
    if (line.find(" copy of step ") != std::string::npos) said += line + "\n";
    if (line.find("warning: ") != std::string::npos) warnings += line + "\n";
  }
  EXPECT_EQ(said, "whole copy of step 4\nwhole copy of step 4\nwhole copy of step 8\n");
  EXPECT_EQ(warnings.rfind("[smp rank 0 pp 0/2] warning: smp::keep_copy: "), 0U) << outcome.output;
  EXPECT_NE(warnings.find("No space left on device"), std::string::npos) << outcome.output;
  EXPECT_NE(warnings.find("Training goes on, and the copy before stays"), std::string::npos)
      << outcome.output;
}

}  // namespace
}  // namespace smp::testing
