// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/catalog.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/reader.h"
#include "checkpoint/writer.h"
#include "tests/checkpoint/test_util.h"

namespace smp::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CatalogTest : public FolderTest {
 protected:
  void save(const std::string& name) {
    const Writer writer(path(name));
    writer.begin();
    Shard shard;
    shard.model = {{"weight", at::ones({2}), {}}};
    RunState run;
    run.step = ++step_;
    writer.commit({writer.write_shard(0, 1, shard)}, run);
    // The later the step, the earlier the time: it does not count.
    fs::last_write_time(path(name) + "/index.json",
                        fs::file_time_type(std::chrono::hours(100 - step_)));
  }

  std::vector<std::string> names() {
    std::vector<std::string> names;
    for (const auto& entry : list_checkpoints(path(""))) names.push_back(entry.name);
    return names;
  }

 private:
  int step_ = 0;
};

TEST_F(CatalogTest, ListsFinishedCheckpointsInTheOrderOfTheirSteps) {
  for (const char* name : {"b", "c_partial", "a"}) save(name);
  save("d.replaced");
  Writer(path("e")).begin();
  fs::create_directories(path("notes"));
  spill(path("newest"), "a\n");
  EXPECT_THAT(names(), ElementsAre("b", "c_partial", "a"));
  EXPECT_THAT(checkpoint_error([&] { list_checkpoints(path("none")); }),
              HasSubstr("cannot list the checkpoints in \"" + path("none") + "\": "));
}

TEST_F(CatalogTest, KeepsTheNewestPartialOnes) {
  for (const char* name : {"1_partial", "2_partial", "full", "3_partial", "4_partial"}) save(name);
  keep_partial(path(""), 3, "4_partial");
  EXPECT_THAT(names(), ElementsAre("2_partial", "full", "3_partial", "4_partial"));
  // One that was just saved stays, whatever its step.
  keep_partial(path(""), 2, "2_partial");
  EXPECT_THAT(names(), ElementsAre("2_partial", "full", "4_partial"));
  keep_partial(path(""), 9, "4_partial");
  EXPECT_THAT(names(), ElementsAre("2_partial", "full", "4_partial"));
  keep_partial(path(""), 1, "4_partial");
  EXPECT_THAT(names(), ElementsAre("full", "4_partial"));
}

TEST_F(CatalogTest, LeavesWhatItCannotRead) {
  for (const char* name : {"1_partial", "2_partial", "3_partial"}) save(name);
  spill(path("1_partial/index.json"), "{");
  keep_partial(path(""), 1, "3_partial");
  EXPECT_THAT(names(), ElementsAre("1_partial", "3_partial"));
}

TEST_F(CatalogTest, FinishesARemovalThatWasInterrupted) {
  save("1_partial");
  fs::rename(path("1_partial"), path("1_partial.removed"));
  fs::remove(path("1_partial.removed/model-00001-of-00001.safetensors"));
  fs::create_directory(path("2_partial.removed"));  // its index was the last
  save("4_partial");
  fs::rename(path("4_partial"), path("4_partial.removed"));
  fs::remove(path("4_partial.removed/index.json"));  // a disk kept files that were removed before
  save("3_partial");
  EXPECT_THAT(names(), ElementsAre("3_partial"));
  keep_partial(path(""), 5, "3_partial");
  EXPECT_FALSE(fs::exists(path("1_partial.removed")));
  EXPECT_FALSE(fs::exists(path("2_partial.removed")));
  EXPECT_FALSE(fs::exists(path("4_partial.removed")));
}

TEST_F(CatalogTest, LeavesWhatHasTheNameOfARemovalAndIsNone) {
  save("1_partial");
  save("2_partial");
  for (const char* name :
       {"1_partial.removed", "notes_partial.removed", "foreign_partial.removed"}) {
    fs::create_directory(path(name));
    spill(path(name + std::string("/notes")), "mine");
  }
  spill(path("foreign_partial.removed/index.json"), R"({"files": []})");
  fs::create_directory(path("folder"));
  fs::create_directory_symlink(path("folder"), path("link_partial.removed"));
  spill(path("file_partial.removed"), "mine");
  keep_partial(path(""), 5, "2_partial");
  for (const char* name : {"1_partial.removed/notes", "notes_partial.removed/notes",
                           "foreign_partial.removed/notes", "file_partial.removed"}) {
    EXPECT_EQ(slurp(path(name)), "mine") << name;
  }
  EXPECT_TRUE(fs::is_symlink(fs::symlink_status(path("link_partial.removed"))));

  // It would be in the way of the checkpoint that is to go.
  EXPECT_THAT(checkpoint_error([&] { keep_partial(path(""), 1, "2_partial"); }),
              HasSubstr("cannot remove old checkpoint \"" + path("") +
                        "1_partial\": expected at \"" + path("") +
                        "1_partial.removed\" nothing, or what a removal has left, got something "
                        "else. Move it away."));
  EXPECT_EQ(slurp(path("1_partial.removed/notes")), "mine");
  EXPECT_THAT(names(), ElementsAre("1_partial", "2_partial"));
}

TEST_F(CatalogTest, RecordsTheNewest) {
  EXPECT_THAT(checkpoint_error([&] { read_newest(path("")); }),
              HasSubstr("\" has no record of its newest checkpoint: expected a file \"" + path("") +
                        "/newest\", got none. It holds no checkpoint: name another folder, or "
                        "begin a run without one, LoadOptions().begin_anew(true)."));
  save("1_partial");
  EXPECT_THAT(checkpoint_error([&] { read_newest(path("")); }),
              HasSubstr("newest\", got none. Name the checkpoint to load."));
  update_newest(path(""), "step_100");
  update_newest(path(""), "step_200_partial");
  EXPECT_EQ(read_newest(path("")), "step_200_partial");
  spill(path("newest"), "../elsewhere\n");
  EXPECT_THAT(
      checkpoint_error([&] { read_newest(path("")); }),
      HasSubstr("newest\" is damaged: expected the name of a folder, got \"../elsewhere\""));
}

TEST_F(CatalogTest, FindsByTagOrTheNewest) {
  update_newest(path(""), "step_200_partial");
  EXPECT_EQ(find_checkpoint(path(""), std::nullopt, /*partial=*/true), "step_200_partial");
  EXPECT_EQ(find_checkpoint(path(""), "step_100", /*partial=*/true), "step_100_partial");
  EXPECT_EQ(find_checkpoint(path(""), "step_100", /*partial=*/false), "step_100");
  EXPECT_THAT(
      checkpoint_error([&] { find_checkpoint(path(""), std::nullopt, /*partial=*/false); }),
      HasSubstr("is \"step_200_partial\": expected a full one, got a partial one. Give the tag of "
                "the checkpoint to load, or set partial to true."));
}

TEST_F(CatalogTest, TagsAreFolderNames) {
  for (const char* tag : {"", "a/b", ".", "..", "newest", "a_partial", "a.tmp", "a.replaced",
                          "a.lock", "a.removed"}) {
    try {
      folder_name(tag, true);
      ADD_FAILURE() << tag;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("cannot be the tag of a checkpoint: expected the name of a "
                            "folder, not"));
    }
  }
}

}  // namespace
}  // namespace smp::checkpoint
