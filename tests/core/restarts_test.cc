// SPDX-License-Identifier: Apache-2.0
#include "tools/restarts.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/failure.h"
#include "tools/launch.h"

namespace smp::tools {
namespace {

using core::JobProgress;
using Checkpoints = std::vector<core::SavedCheckpoint>;

TEST(Restarts, NobodyWantsAny) {
  const auto decision = Restarts(0, true).after("killed", JobProgress{3, {{"a", 1}}});
  EXPECT_FALSE(decision.again);
  EXPECT_EQ(decision.text, "");
}

TEST(Restarts, WaitLongerWhereNothingIsGained) {
  Restarts restarts(100, true);
  for (const int64_t wait : {2, 4, 8, 16, 32, 60, 60}) {
    const auto decision = restarts.after("killed", JobProgress{wait + restarts.next().number, {}});
    EXPECT_TRUE(decision.again);
    EXPECT_EQ(decision.wait.count(), wait);
  }
  const auto decision = restarts.after("killed", JobProgress{900, {{"run/a", 890}}});
  EXPECT_EQ(decision.text, "smprun: restart 8 of 100 in 1 s: from checkpoint run/a\n");
  EXPECT_EQ(decision.wait.count(), 1);
}

TEST(Restarts, KnowTheNewestCheckpointsOfAllStarts) {
  Restarts restarts(9, true);
  restarts.after("one", JobProgress{7, {{"a", 1}, {"b", 2}, {"a", 3}}});
  restarts.after("two", JobProgress{6, {}});
  restarts.after("three", std::nullopt);
  const core::Restart next = restarts.next();
  EXPECT_EQ(next.number, 3);
  EXPECT_EQ(next.before.steps, 7);
  EXPECT_EQ(next.before.checkpoints, (Checkpoints{{"b", 2}, {"a", 3}}));
  JobProgress many;
  for (int i = 0; i < 20; ++i) many.checkpoints.push_back({std::to_string(i), i});
  restarts.after("four", many);
  EXPECT_EQ(restarts.next().before.checkpoints.size(), 16);
  EXPECT_EQ(restarts.next().before.checkpoints.back().path, "19");
}

TEST(Restarts, EndWhereAFailureComesBack) {
  Restarts restarts(9, true);
  EXPECT_TRUE(restarts.after("killed", JobProgress{7, {{"a", 5}}}).again);
  EXPECT_TRUE(restarts.after("killed", JobProgress{8, {}}).again);
  EXPECT_TRUE(restarts.after("no memory", JobProgress{8, {}}).again);
  const auto decision = restarts.after("no memory", JobProgress{8, {}});
  EXPECT_FALSE(decision.again);
  EXPECT_EQ(decision.text,
            "smprun: not started again: it has failed twice with this cause, after step 8.\n");
}

/// A job with "recovery" is started again though nobody has said how often.
TEST(Restarts, OfAJobThatRecovers) {
  Restarts restarts(std::nullopt, true);
  EXPECT_FALSE(Restarts(std::nullopt, true).after("killed", JobProgress{3, {}}).again);
  EXPECT_FALSE(Restarts(0, true).after("killed", JobProgress{3, {}}, /*recovers=*/true).again);

  auto decision = restarts.after("killed", JobProgress{3, {{"a", 1}}, 2}, true);
  EXPECT_EQ(decision.text, "smprun: restart 1 in 0 s: from the copy in memory, of step 2\n");
  EXPECT_EQ(decision.wait.count(), 0);
  decision = restarts.after("no memory", JobProgress{3, {}}, true);
  EXPECT_EQ(decision.text, "smprun: restart 2 in 2 s: from the copy in memory, of step 2\n");
  EXPECT_EQ(restarts.next().before.kept_steps, 2);
  decision = restarts.after("killed", JobProgress{9, {}, 9}, true);
  EXPECT_EQ(decision.wait.count(), 0);
  EXPECT_EQ(restarts.next().before.kept_steps, 9);
  decision = restarts.after("killed", JobProgress{9, {}, 9}, true);
  EXPECT_EQ(decision.text,
            "smprun: not started again: it has failed twice with this cause, after step 9.\n");
}

/// A checkpoint that was saved after the last copy is what the job goes on from.
TEST(Restarts, SayTheNewestOfCopyAndCheckpoint) {
  Restarts restarts(std::nullopt, true);
  auto decision = restarts.after("killed", JobProgress{9, {{"run/a", 7}}, 6}, true);
  EXPECT_EQ(decision.text, "smprun: restart 1 in 0 s: from checkpoint run/a\n");
  decision = restarts.after("no memory", JobProgress{9, {}, 7}, true);
  EXPECT_EQ(decision.text, "smprun: restart 2 in 0 s: from the copy in memory, of step 7\n");
}

TEST(Restarts, NeedTheNotesOfRank0) {
  const auto decision = Restarts(9, /*one_host=*/false).after("killed", std::nullopt);
  EXPECT_FALSE(decision.again);
  EXPECT_EQ(decision.text,
            "smprun: not started again: rank 0 has not come to smp::init, or cannot write to the "
            "launcher's folder. On several hosts, set TMPDIR to a folder that all of them see.\n");
}

TEST(Restarts, AreToldToTheJob) {
  LaunchOptions options;
  options.np = 2;
  options.program = {"p"};
  LaunchContext context;
  context.restart = core::Restart{2, {40, {{"a b", 20}, {"\"c\"", 30}}, 38}};
  const LaunchCommand command = plan_launch(options, context);
  ASSERT_EQ(command.environment.size(), 1);
  const auto& [name, value] = command.environment.front();
  EXPECT_EQ(name, core::kRestartVariable);
  EXPECT_FALSE(core::this_restart());
  setenv(name.c_str(), value.c_str(), 1);
  const auto told = core::this_restart();
  unsetenv(name.c_str());
  ASSERT_TRUE(told);
  EXPECT_EQ(told->number, 2);
  EXPECT_EQ(told->before.steps, 40);
  EXPECT_EQ(told->before.kept_steps, 38);
  EXPECT_EQ(told->before.checkpoints, context.restart->before.checkpoints);
}

TEST(Restarts, NotesAreReadAgain) {
  const std::string folder = ::testing::TempDir() + "notes";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  EXPECT_FALSE(core::read_progress(folder));
  core::note_steps(1);  // for nobody
  setenv(core::kFailureDirVariable, folder.c_str(), 1);
  core::note_steps(123456);
  core::note_steps(7);
  core::note_checkpoint({"a\n\"b\"", 3});
  std::ofstream(folder + "/checkpoints", std::ios::app) << "\"cut by a full di\n";
  core::note_checkpoint({"c", 5});
  EXPECT_FALSE(core::read_progress(folder)->kept_steps);
  core::note_kept_copy(123);
  core::note_kept_copy(6);
  EXPECT_FALSE(core::read_configuration(folder));
  core::note_configuration(R"({"partitions":2})");
  unsetenv(core::kFailureDirVariable);
  const auto noted = core::read_progress(folder);
  ASSERT_TRUE(noted);
  EXPECT_EQ(noted->kept_steps, 6);
  EXPECT_EQ(core::read_configuration(folder), R"({"partitions":2})");
  EXPECT_EQ(noted->steps, 7);
  EXPECT_EQ(noted->checkpoints, (Checkpoints{{"a\n\"b\"", 3}, {"c", 5}}));
  EXPECT_TRUE(core::read_failures(folder).empty());
}

}  // namespace
}  // namespace smp::tools
