// SPDX-License-Identifier: Apache-2.0
// Saves in the background on ranks that are processes, and what is left when one of them dies.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
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
    std::ofstream(config_) << R"({"partitions": 2, "microbatches": 2})";
  }

  Outcome run(const std::string& call = "") const {
    return run_command("tools/smprun_bin --config " + config_ +
                       " --np 2 tests/failure/saving_step " + folder_ + " " + call + " 2>&1");
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
  // With the hashes of all tensors.
  EXPECT_EQ(Reader(folder_ + "/a").index().to_text(),
            Reader(folder_ + "/expected").index().to_text());
}

/// At the first call of a file, in the middle of one and between two.
TEST_F(Saving, RankThatIsKilledLeavesTheEarlierCheckpoint) {
  for (const char* call : {"0", "2", "6"}) {
    SCOPED_TRACE(call);
    const Outcome outcome = run(call);
    EXPECT_NE(outcome.status, 0) << outcome.output;
    EXPECT_NE(outcome.output.find("signal 9"), std::string::npos) << outcome.output;
    EXPECT_EQ(saved(), 1);
  }
  const Outcome again = run();  // what was left of the others is no hindrance
  EXPECT_EQ(again.status, 0) << again.output;
  EXPECT_EQ(saved(), 2);
}

}  // namespace
}  // namespace smp::testing
