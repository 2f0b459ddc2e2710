// SPDX-License-Identifier: Apache-2.0
#include <ATen/Functions.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "checkpoint/file.h"
#include "checkpoint/reader.h"
#include "checkpoint/writer.h"
#include "tests/checkpoint/test_util.h"
#include "tests/checkpoint/two_shards.h"

namespace smp::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

class FolderFormatTest : public FolderTest {};

TEST_F(FolderFormatTest, TwoRanksRoundTrip) {
  save(path("c"), 1.5);
  Reader reader(path("c"));
  EXPECT_TRUE(at::equal(reader.read_model("encoder.weight"), at::full({2, 3}, 1.5)));
  EXPECT_TRUE(at::equal(reader.read_model("decoder.weight"), at::full({2, 3}, 1.5)));
  EXPECT_TRUE(at::equal(reader.read_model("norm.count"), at::tensor(int64_t{7})));
  EXPECT_TRUE(at::equal(reader.read_optimizer("head.bias/exp_avg"), at::full({4}, 0.375)));
  const Index& index = reader.index();
  EXPECT_EQ(index.model.size(), 3u);  // the tied weight is stored once
  EXPECT_EQ(index.run.step, 100);
  EXPECT_EQ(index.run.gradient_shards, 2);
  EXPECT_EQ(index.run.random.seed, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(index.run.random.step_calls, run_state(0).random.step_calls);
  EXPECT_EQ(index.run.user_content, run_state(0).user_content);
  EXPECT_EQ(index.run.extra, run_state(0).extra);
  EXPECT_EQ(index.optimizer["param_groups"].size(), 1u);
  EXPECT_EQ(index.optimizer["param_groups"][0]["params"],
            nlohmann::json({"encoder.weight", "head.bias"}));
  EXPECT_EQ(index.optimizer["state"]["head.bias"]["scalars"]["step"], 3);
  EXPECT_EQ(index.optimizer["loss_scale"], 1024);
  EXPECT_THAT(checkpoint_error([&] { reader.read_model("absent"); }),
              HasSubstr("has no model tensor \"absent\""));
  EXPECT_THAT(checkpoint_error([&] { reader.read_optimizer("head.bias/absent"); }),
              HasSubstr("has no optimizer tensor \"head.bias/absent\". Check the name against its "
                        "index.json."));
}

TEST_F(FolderFormatTest, HoldsExactlyTheDocumentedFiles) {
  save(path("c"), 1);
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(path("c"))) {
    names.insert(entry.path().filename());
  }
  EXPECT_EQ(names, (std::set<std::string>{"index.json", "model-00001-of-00002.safetensors",
                                          "model-00002-of-00002.safetensors",
                                          "optimizer-00001-of-00002.safetensors",
                                          "optimizer-00002-of-00002.safetensors"}));
}

TEST_F(FolderFormatTest, IndexIsPleasantToRead) {
  const Writer writer(path("c"));
  writer.begin();
  Shard shard = two_shards(0)[0];
  shard.optimizer["state"]["encoder.weight"]["scalars"]["a_long_name"] = std::string(140, 'x');
  writer.commit({writer.write_shard(0, 1, shard)}, run_state(7));
  // bb33... is the XXH64 of 24 zero bytes, from Python's xxhash.
  EXPECT_EQ(slurp(path("c/index.json")), with_checksum(R"({
  "format": "smp-checkpoint",
  "format_version": 3,
  "checksum": "0000000000000000",
  "step": 7,
  "gradient_shards": 2,
  "random": {"seed": 18446744073709551615, "step_calls": {"evaluate": 20, "train": 10}},
  "user_content": {"epoch": 5, "note": "fine"},
  "extra": {"scheduler": {"epoch": 3}},
  "files": {"model-00001-of-00001.safetensors": 136, "optimizer-00001-of-00001.safetensors": 144},
  "model": {
    "encoder.weight": {"dtype": "F32", "shape": [2, 3], "file": "model-00001-of-00001.safetensors", "xxh64": "bb3302e8a9608868"},
    "decoder.weight": {"same_as": "encoder.weight"}
  },
  "optimizer": {
    "loss_scale": 1024,
    "param_groups": [{"options": {"lr": 0.1}, "params": ["encoder.weight"], "type": "AdamOptions"}],
    "state": {
      "encoder.weight": {
        "scalars": {
          "a_long_name": ")" + std::string(140, 'x') +
                                                       R"(",
          "step": 3
        },
        "shape": [2, 3]
      }
    },
    "tensors": {"encoder.weight/exp_avg": {"dtype": "F32", "shape": [2, 3], "file": "optimizer-00001-of-00001.safetensors", "xxh64": "bb3302e8a9608868"}}
  }
}
)"));
}

TEST_F(FolderFormatTest, ReplacesAnExistingCheckpoint) {
  save(path("c/"), 1);
  save(path("c"), 2);
  EXPECT_EQ(loaded_value(path("c")), 2);
  EXPECT_FALSE(fs::exists(path("c.tmp")));
  EXPECT_FALSE(fs::exists(path("c.replaced")));
}

// Every point at which a save of 2 over an existing 1 may stop; the next save must recover.
TEST_F(FolderFormatTest, CrashBeforeTheRenamesLeavesThePreviousCheckpoint) {
  save(path("c"), 1);
  {
    const Writer writer(path("c"));
    writer.begin();
    EXPECT_EQ(loaded_value(path("c")), 1);
    writer.write_shard(0, 2, two_shards(2)[0]);
    EXPECT_EQ(loaded_value(path("c")), 1);
  }
  spill(path("c.tmp/index.json"), "{\"format\": \"smp");
  EXPECT_EQ(loaded_value(path("c")), 1);
  save(path("c"), 3);
  EXPECT_EQ(loaded_value(path("c")), 3);
}

TEST_F(FolderFormatTest, CrashBetweenTheRenamesLeavesThePreviousCheckpoint) {
  save(path("c"), 1);
  fs::rename(path("c"), path("c.replaced"));
  EXPECT_EQ(loaded_value(path("c")), 1);
  EXPECT_EQ(loaded_value(path("c/")), 1);
  EXPECT_EQ(Reader(path("c")).folder(), path("c.replaced"));

  const Writer writer(path("c"));
  writer.begin();
  EXPECT_EQ(Reader(path("c")).folder(), path("c"));
  EXPECT_EQ(loaded_value(path("c")), 1);
  writer.commit(write_shards(writer, two_shards(2)), run_state(1));
  EXPECT_EQ(loaded_value(path("c")), 2);
}

TEST_F(FolderFormatTest, CrashAfterTheRenamesLeavesTheNewCheckpoint) {
  save(path("c"), 2);
  save(path("c.replaced"), 1);
  EXPECT_EQ(loaded_value(path("c")), 2);
  save(path("c"), 3);
  EXPECT_EQ(loaded_value(path("c")), 3);
  EXPECT_FALSE(fs::exists(path("c.replaced")));
}

TEST_F(FolderFormatTest, StaleFilesOfACrashedSaveDoNotReachTheNextOne) {
  {
    const Writer writer(path("c"));
    writer.begin();
    writer.write_shard(6, 8, two_shards(9)[0]);
  }
  save(path("c"), 1);
  EXPECT_FALSE(fs::exists(path("c/model-00007-of-00008.safetensors")));
}

TEST_F(FolderFormatTest, NeverReplacesWhatIsNotACheckpoint) {
  const auto refusal = [&](const std::string& folder, const std::string& got) {
    return HasSubstr("cannot save checkpoint \"" + path("c") + "\": expected at \"" + path(folder) +
                     "\" a new name or an existing checkpoint, got " + got +
                     ". Choose another path, or remove it first.");
  };
  // The folder itself, and those that a save makes beside it.
  for (const std::string folder : {"c", "c.tmp", "c.replaced"}) {
    SCOPED_TRACE(folder);
    spill(path(folder), "years of work");
    EXPECT_THAT(checkpoint_error([&] { save(path("c"), 1); }),
                refusal(folder, "something that is no folder"));
    EXPECT_EQ(slurp(path(folder)), "years of work");
    fs::remove(path(folder));

    fs::create_directories(path(folder));
    spill(path(folder + "/thesis.txt"), "years of work");
    spill(path(folder + "/index.json"), "{\"format\": \"smp-checkpoint\"}");
    EXPECT_THAT(checkpoint_error([&] { save(path("c"), 1); }),
                refusal(folder, "a folder with \"thesis.txt\""));
    EXPECT_EQ(slurp(path(folder + "/thesis.txt")), "years of work");

    fs::remove(path(folder + "/thesis.txt"));
    fs::create_directories(path(folder + "/model.safetensors"));
    EXPECT_THAT(checkpoint_error([&] { save(path("c"), 1); }),
                refusal(folder, "a folder with \"model.safetensors\""));
    fs::remove_all(path(folder));
  }
  for (const std::string folder : {"c", "c.replaced"}) {
    fs::create_directories(path(folder));
    spill(path(folder + "/index.json"), "{\"pages\": 12}");
    EXPECT_THAT(checkpoint_error([&] { save(path("c"), 1); }),
                refusal(folder, "one without an index.json of smp"));
    EXPECT_EQ(slurp(path(folder + "/index.json")), "{\"pages\": 12}");
    fs::remove_all(path(folder));
  }
  save(path("c"), 1);
  EXPECT_EQ(loaded_value(path("c")), 1);
}

TEST_F(FolderFormatTest, SavesWhereALinkPoints) {
  save(path("disk"), 1);
  fs::create_directory_symlink(path("disk"), path("c"));
  save(path("c"), 2);
  EXPECT_TRUE(fs::is_symlink(path("c")));
  EXPECT_EQ(loaded_value(path("c")), 2);
  EXPECT_EQ(loaded_value(path("disk")), 2);
}

TEST_F(FolderFormatTest, ASecondSaveIsRefusedWhileTheFirstGoesOn) {
  save(path("c"), 1);
  {
    const Writer first(path("c"));
    first.begin();
    const auto parts = write_shards(first, two_shards(2));
    EXPECT_THAT(
        checkpoint_error([&] { save(path("c/"), 3); }),
        MatchesRegex(
            ".*cannot save checkpoint \".*/c\": process " + std::to_string(getpid()) +
            " on [^ ]+ saves there, since 20..-..-..T..:..:..Z \\(\".*/c.lock\" is locked\\). "
            "Give each job a folder of its own."));
    first.commit(parts, run_state(1));
  }
  EXPECT_EQ(loaded_value(path("c")), 2);
  EXPECT_FALSE(fs::exists(path("c.lock")));
  spill(path("c.lock"), "process 1 on here saves there, since 2026-01-01T00:00:00Z");  // was killed
  save(path("c"), 3);
  EXPECT_EQ(loaded_value(path("c")), 3);
  EXPECT_FALSE(fs::exists(path("c.lock")));
  {
    const Writer abandoned(path("c"));
    abandoned.begin();
    abandoned.abandon();
    save(path("c"), 4);
  }
  EXPECT_EQ(loaded_value(path("c")), 4);
}

// Another program's file, or another user's.
TEST_F(FolderFormatTest, SavesTouchNoFileThatIsNotTheirs) {
  for (const std::string content : {"", "process of mine", "saves there, since"}) {
    spill(path("c.lock"), content);
    save(path("c"), 1);
    EXPECT_TRUE(fs::exists(path("c.lock")));
    EXPECT_EQ(slurp(path("c.lock")), content);
  }
  {
    const int foreign = open(path("c.lock").c_str(), O_RDONLY | O_CLOEXEC);
    ASSERT_EQ(flock(foreign, LOCK_EX), 0);
    EXPECT_THAT(checkpoint_error([&] { save(path("c"), 2); }),
                HasSubstr("another process has locked it (\"" + path("c.lock") + "\" is locked)."));
    close(foreign);
  }
  fs::remove(path("c.lock"));
  spill(path("diary"), "dear diary");
  const auto refused = [&](const std::string& action) {
    EXPECT_THAT(checkpoint_error([&] { save(path("c"), 2); }),
                HasSubstr("expected at \"" + path("c.lock") +
                          "\" no file, or one that can be locked, got a link or something else. "
                          "Remove it, or save elsewhere."))
        << action;
    EXPECT_TRUE(fs::exists(fs::symlink_status(path("c.lock"))));
    fs::remove(path("c.lock"));
  };
  fs::create_symlink(path("diary"), path("c.lock"));
  refused("a link");
  fs::create_symlink(path("nothing"), path("c.lock"));
  refused("a link to nothing");
  ASSERT_EQ(mkfifo(path("c.lock").c_str(), 0600), 0);
  refused("a pipe");
  EXPECT_EQ(slurp(path("diary")), "dear diary");
  EXPECT_FALSE(fs::exists(path("nothing")));
}

TEST_F(FolderFormatTest, TemporaryFilesAreNew) {
  spill(path("diary"), "dear diary");
  fs::create_hard_link(path("diary"), path("f.tmp"));
  write_file(path("f"), "text");  // over the leftover of an earlier save
  EXPECT_EQ(slurp(path("f")), "text");
  EXPECT_EQ(slurp(path("diary")), "dear diary");
  fs::create_symlink(path("diary"), path("f.tmp"));
  EXPECT_THAT(checkpoint_error([&] { write_file(path("f"), "other"); }),
              HasSubstr("cannot create \"" + path("f.tmp") +
                        "\": something that is no file of a save has this name. Remove it, or save "
                        "elsewhere."));
  EXPECT_EQ(slurp(path("diary")), "dear diary");
  EXPECT_EQ(slurp(path("f")), "text");
  // In memory, where the old file is written over.
  EXPECT_THAT(checkpoint_error([&] { FileWriter(path("f.tmp"), Medium::kMemory); }),
              HasSubstr("cannot create \"" + path("f.tmp") + "\""));
  EXPECT_EQ(slurp(path("diary")), "dear diary");
}

TEST_F(FolderFormatTest, RefusesWhatWouldNotEnd) {
  save(path("c"), 1);
  fs::remove(path("c/index.json"));
  ASSERT_EQ(mkfifo(path("c/index.json").c_str(), 0600), 0);
  EXPECT_THAT(checkpoint_error([&] { Reader(path("c")); }),
              HasSubstr("cannot read \"" + path("c/index.json") + "\": expected a regular file."));
  fs::remove(path("c/index.json"));
  std::ofstream(path("c/index.json")) << "{}";
  fs::resize_file(path("c/index.json"), kMostText + 1);  // takes no room
  EXPECT_THAT(
      checkpoint_error([&] { Reader(path("c")); }),
      HasSubstr("expected at most 268435456 bytes of text, got 268435457. It is not the file "
                "that was written: use another one."));
  EXPECT_THAT(
      checkpoint_error([] { Index().to_text(100); }),
      HasSubstr("cannot write the index of a checkpoint: expected at most 100 bytes of names, "
                "options and user_content, got "));
}

// Which rank brings which parameters is a matter of the layout.
TEST_F(FolderFormatTest, TheIndexDoesNotSayWhichRankHadWhichParameters) {
  std::vector<std::string> texts;
  for (const bool reversed : {false, true}) {
    std::vector<Shard> shards = two_shards(1);
    const Writer writer(path("c"));
    writer.begin();
    auto parts = write_shards(writer, shards);
    if (reversed) std::swap(parts[0], parts[1]);
    writer.commit(parts, run_state(1));
    texts.push_back(slurp(path("c/index.json")));
  }
  EXPECT_EQ(texts[0], texts[1]);
}

// A child of fork() keeps the descriptors of its parent.
TEST_F(FolderFormatTest, ALockEndsWithItsSaveThoughAChildLivesOn) {
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  const Writer writer(path("c"));
  writer.begin();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(pipe_ends[1]);
    char end = 0;
    (void)!read(pipe_ends[0], &end, 1);  // until the parent closes its end
    _exit(0);
  }
  close(pipe_ends[0]);
  writer.commit(write_shards(writer, two_shards(1)), run_state(1));
  save(path("c"), 2);
  EXPECT_EQ(loaded_value(path("c")), 2);
  close(pipe_ends[1]);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
}

TEST_F(FolderFormatTest, AReaderKeepsTheCheckpointThatItHasOpened) {
  save(path("c"), 1);
  Reader reader(path("c"));
  save(path("c"), 2);
  EXPECT_EQ(reader.find_damage(Reader::Section::kAll), std::vector<std::string>{});
  EXPECT_EQ(reader.read_model("head.bias")[0].item<double>(), 1);
  EXPECT_EQ(loaded_value(path("c")), 2);
}

TEST_F(FolderFormatTest, PathsThatCannotBeWritten) {
  spill(path("file"), "in the way");
  EXPECT_THAT(checkpoint_error([&] { Writer(path("file/c")).begin(); }),
              AllOf(HasSubstr("cannot save checkpoint \"" + path("file/c") + "\": "),
                    HasSubstr("Not a directory"),
                    HasSubstr("Check the path, its permissions and the free space.")));
  // The folder of an unfinished save disappears, as in a clean-up.
  const Writer writer(path("c"));
  writer.begin();
  fs::remove(path("c.tmp"));
  EXPECT_THAT(checkpoint_error([&] { write_shards(writer, two_shards(1)); }),
              HasSubstr("cannot create \"" + path("c.tmp/model-00001-of-00002.safetensors.tmp") +
                        "\": No such file or directory. Check the path, its permissions and the "
                        "free space."));
}

TEST_F(FolderFormatTest, MergeRefusesWhatRanksDisagreeAbout) {
  const Writer writer(path("c"));
  const auto error_with = [&](const std::function<void(Shard&)>& change) {
    std::vector<Shard> shards = two_shards(1);
    change(shards[1]);
    writer.begin();
    const std::vector<std::string> parts = write_shards(writer, shards);
    return checkpoint_error([&] { writer.commit(parts, run_state(1)); });
  };
  EXPECT_THAT(error_with([](Shard& s) { s.model[0].name = "encoder.weight"; }),
              HasSubstr("tensor \"encoder.weight\" was written by two ranks"));
  EXPECT_THAT(error_with([](Shard& s) { s.model[0].name = "decoder.weight"; }),
              HasSubstr("tensor \"decoder.weight\" is written by one rank and tied to "
                        "\"encoder.weight\" on another. Let only the owner of a tensor write it."));
  EXPECT_THAT(error_with([](Shard& s) { s.optimizer["param_groups"][0]["options"]["lr"] = 0.2; }),
              AllOf(HasSubstr("param group 0 differs between ranks: {\"options\":{\"lr\":0.1}"),
                    HasSubstr("Set the same options on every rank.")));
  EXPECT_THAT(error_with([](Shard& s) { s.optimizer["state"] = 1; }),
              HasSubstr("is malformed at \"optimizer.state\": expected an object, got 1."));
  EXPECT_THAT(error_with([](Shard& s) { s.optimizer["loss_scale"] = 1; }),
              HasSubstr("cannot merge the parts of a checkpoint: optimizer \"loss_scale\" differs "
                        "between ranks: 1024 and 1. Give the same on every rank."));
  EXPECT_FALSE(fs::exists(path("c")));
}

TEST_F(FolderFormatTest, WriterChecksItsArguments) {
  const Writer writer(path("c"));
  writer.begin();
  EXPECT_THAT(checkpoint_error([&] { writer.write_shard(2, 2, {}); }),
              HasSubstr("expected a shard id from 0 to 1, got 2"));
  Shard shard = two_shards(1)[1];
  shard.model[0].aliases = {"norm.count"};
  EXPECT_THAT(checkpoint_error([&] { writer.write_shard(0, 1, shard); }),
              HasSubstr("\"norm.count\", listed as another name of \"head.bias\", names another"));
  EXPECT_THAT(checkpoint_error([&] {
                RunState run;
                run.user_content = "\xff";
                writer.commit({}, run);
              }),
              HasSubstr("expected UTF-8 text"));
}

}  // namespace
}  // namespace smp::checkpoint
