// SPDX-License-Identifier: Apache-2.0
#include "tools/restarts.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/failure.h"
#include "tests/error_of.h"
#include "tests/temp_folder.h"
#include "tools/launch.h"

namespace smp::tools {
namespace {

using core::JobProgress;
using Checkpoints = std::vector<core::SavedCheckpoint>;

TEST(Restarts, NobodyWantsAny) {
  const auto decision = Restarts(0, true).after(JobProgress{3, {{"a", 1}}});
  EXPECT_FALSE(decision.again);
  EXPECT_EQ(decision.text, "");
}

TEST(Restarts, WaitLongerWhereNothingIsGained) {
  Restarts restarts(100, true);
  for (const int64_t wait : {2, 4, 8, 16, 32, 60, 60}) {
    const auto decision = restarts.after(JobProgress{wait + restarts.next().number, {}});
    EXPECT_TRUE(decision.again);
    EXPECT_EQ(decision.wait.count(), wait);
  }
  const auto decision = restarts.after(JobProgress{900, {{"run/a", 890}}});
  EXPECT_EQ(decision.text, "smprun: restart 8 of 100 in 1 s: from checkpoint run/a\n");
  EXPECT_EQ(decision.wait.count(), 1);
}

TEST(Restarts, KnowTheNewestCheckpointsOfAllStarts) {
  Restarts restarts(9, true);
  restarts.after(JobProgress{7, {{"a", 1}, {"b", 2}, {"a", 3}}});
  restarts.after(JobProgress{6, {}});
  restarts.after(std::nullopt);
  const core::Restart next = restarts.next();
  EXPECT_EQ(next.number, 3);
  EXPECT_EQ(next.before.steps, 7);
  EXPECT_EQ(next.before.checkpoints, (Checkpoints{{"b", 2}, {"a", 3}}));
  JobProgress many{8, {}, {}};
  for (int i = 0; i < 20; ++i) many.checkpoints.push_back({std::to_string(i), i});
  restarts.after(many);
  EXPECT_EQ(restarts.next().before.checkpoints.size(), 16);
  EXPECT_EQ(restarts.next().before.checkpoints.back().path, "19");
}

/// Whatever each of the failures says.
TEST(Restarts, EndWhereNoStepIsWon) {
  Restarts restarts(99, true);
  for (const int64_t steps : {8, 8, 3}) EXPECT_TRUE(restarts.after(JobProgress{steps, {}}).again);
  const auto decision = restarts.after(JobProgress{7, {}});
  EXPECT_FALSE(decision.again);
  EXPECT_EQ(decision.text,
            "smprun: not started again: 3 starts in a row have come no further than step 8.\n");
  Restarts before_any(std::nullopt, true);
  EXPECT_TRUE(before_any.after(JobProgress{0, {}}, true).again);
  EXPECT_TRUE(before_any.after(std::nullopt, true).again);
  EXPECT_EQ(before_any.after(JobProgress{0, {}}, true).text,
            "smprun: not started again: 3 starts in a row have not come to the end of the first "
            "step.\n");
}

/// A rank is killed at one step twice, and the job goes on; likewise where each start is killed
/// earlier than the first, and still saves a later checkpoint.
TEST(Restarts, GoOnWhereStepsAreWon) {
  Restarts killed(std::nullopt, true);
  for (const int64_t steps : {8, 8, 8, 9, 9, 9, 10}) {
    EXPECT_TRUE(killed.after(JobProgress{steps, {}}, true).again) << steps;
  }
  Restarts slow(99, true);
  EXPECT_TRUE(slow.after(JobProgress{99, {{"a", 10}}}).again);
  for (const int64_t saved : {20, 30, 40, 50, 60}) {
    EXPECT_TRUE(slow.after(JobProgress{saved + 1, {{"a", saved}}}).again) << saved;
  }
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(slow.after(JobProgress{61, {{"a", 60}}}).again);
  EXPECT_FALSE(slow.after(JobProgress{61, {{"a", 60}}}).again) << "the same checkpoint again";
}

/// A job with "recovery" is started again though no number is given.
TEST(Restarts, OfAJobThatRecovers) {
  Restarts restarts(std::nullopt, true);
  EXPECT_FALSE(Restarts(std::nullopt, true).after(JobProgress{3, {}}).again);
  EXPECT_FALSE(Restarts(0, true).after(JobProgress{3, {}}, /*recovers=*/true).again);

  auto decision = restarts.after(JobProgress{3, {{"a", 1}}, 2}, true);
  EXPECT_EQ(decision.text, "smprun: restart 1 in 0 s: from the copy in memory, of step 2\n");
  EXPECT_EQ(decision.wait.count(), 0);
  decision = restarts.after(JobProgress{3, {}}, true);
  EXPECT_EQ(decision.text, "smprun: restart 2 in 2 s: from the copy in memory, of step 2\n");
  EXPECT_EQ(restarts.next().before.kept_steps, 2);
  decision = restarts.after(JobProgress{9, {}, 9}, true);
  EXPECT_EQ(decision.wait.count(), 0);
  EXPECT_EQ(restarts.next().before.kept_steps, 9);
}

/// A checkpoint that was saved after the last copy is the one from which the job goes on.
TEST(Restarts, SayTheNewestOfCopyAndCheckpoint) {
  Restarts restarts(std::nullopt, true);
  auto decision = restarts.after(JobProgress{9, {{"run/a", 7}}, 6}, true);
  EXPECT_EQ(decision.text, "smprun: restart 1 in 0 s: from checkpoint run/a\n");
  decision = restarts.after(JobProgress{9, {}, 7}, true);
  EXPECT_EQ(decision.text, "smprun: restart 2 in 0 s: from the copy in memory, of step 7\n");
}

TEST(Restarts, NeedTheNotesOfRank0) {
  const auto decision = Restarts(9, /*one_host=*/false).after(std::nullopt);
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
  // The last path is Latin-1, the one before UTF-8.
  context.restart =
      core::Restart{2, {40, {{"a b", 20}, {"\"c\"", 30}, {"\u00e9", 31}, {"\xe9", 32}}, 38}};
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

TEST(Restarts, AreToldByTheLauncherOnly) {
  for (const char* text : {"yes", "[1]", R"({"number": 1})", R"({"number": 1, "steps": "x"})"}) {
    EXPECT_EQ(
        smp::testing::error_of<ConfigError>([&] { core::Restart::from_text(text); }),
        "[smp] the environment variable SMP_RESTART: expected what smprun sets for a job that "
        "it starts again, got " +
            std::string(text) + ". Unset it, and leave it to smprun --restarts or \"recovery\"");
  }
}

/// Under mpirun, whose ranks know their number before MPI begins.
TEST(Restarts, RanksNoteThatTheyHaveArrived) {
  const smp::testing::TempFolder folder;
  EXPECT_TRUE(core::read_arrivals(folder.path()).empty());
  for (const char* rank : {"0", "12"}) {
    setenv("OMPI_COMM_WORLD_RANK", rank, 1);
    core::note_arrival();  // no launcher reads it
    setenv(core::kFailureDirVariable, folder.path().c_str(), 1);
    core::note_arrival();
    unsetenv(core::kFailureDirVariable);
    unsetenv("OMPI_COMM_WORLD_RANK");
  }
  EXPECT_EQ(core::read_arrivals(folder.path()), (std::set<int>{0, 12}));
}

TEST(Restarts, NotesAreReadAgain) {
  const std::string folder = ::testing::TempDir() + "notes";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  EXPECT_FALSE(core::read_progress(folder));
  core::note_steps(1);  // no launcher reads it
  setenv(core::kFailureDirVariable, folder.c_str(), 1);
  core::note_steps(123456);
  core::note_steps(7);
  core::note_checkpoint({"a\n\"b\"", 3});
  std::ofstream(folder + "/checkpoints", std::ios::app) << "\"cut by a full di\n";
  core::note_checkpoint({"c\xe9", 5});
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
  EXPECT_EQ(noted->checkpoints, (Checkpoints{{"a\n\"b\"", 3}, {"c\xe9", 5}}));
  EXPECT_TRUE(core::read_failures(folder).empty());
}

}  // namespace
}  // namespace smp::tools
