// SPDX-License-Identifier: Apache-2.0
// Folders that are no whole checkpoint: files that are missing, damaged or made up.

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "checkpoint/index.h"
#include "checkpoint/reader.h"
#include "checkpoint/writer.h"
#include "tests/checkpoint/test_util.h"
#include "tests/checkpoint/two_shards.h"

namespace smp::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

class UnreadableFolderTest : public FolderTest {
 protected:
  std::string index_with(const std::string& from, const std::string& to) {
    std::string text = slurp(path("c/index.json"));
    const size_t position = text.find(from);
    EXPECT_NE(position, std::string::npos) << from;
    spill(path("c/index.json"), with_checksum(text.replace(position, from.size(), to)));
    return checkpoint_error([&] { Reader reader(path("c")); });
  }
};

TEST_F(UnreadableFolderTest, MissingFolderOrIndex) {
  EXPECT_THAT(checkpoint_error([&] { Reader reader(path("c")); }),
              HasSubstr("c\": expected a folder with index.json, got no such folder. Check"));
  Writer(path("c")).begin();
  EXPECT_THAT(checkpoint_error([&] { Reader reader(path("c")); }),
              HasSubstr("(an unfinished save is at \"" + path("c.tmp") + "\")"));
  fs::create_directories(path("d"));
  EXPECT_THAT(checkpoint_error([&] { Reader reader(path("d")); }),
              HasSubstr("expected a folder with index.json, got no such file in it."));
}

TEST_F(UnreadableFolderTest, MissingAndTruncatedFilesAreListedTogether) {
  save(path("c"), 1);
  const std::string cut = path("c/model-00001-of-00002.safetensors");
  const std::string size = std::to_string(fs::file_size(cut));
  const std::string other =
      std::to_string(fs::file_size(path("c/optimizer-00002-of-00002.safetensors")));
  fs::resize_file(cut, 100);
  fs::remove(path("c/optimizer-00002-of-00002.safetensors"));
  EXPECT_EQ(checkpoint_error([&] { Reader reader(path("c")); }),
            "[smp] checkpoint \"" + path("c") + "\" is incomplete:\n" +
                "  model-00001-of-00002.safetensors: expected " + size + " bytes, got 100\n" +
                "  optimizer-00002-of-00002.safetensors: expected " + other +
                " bytes, got no file\nUse another checkpoint.");
}

TEST_F(UnreadableFolderTest, FlippedByteIsFoundByItsHash) {
  save(path("c"), 1);
  const std::string file = path("c/model-00002-of-00002.safetensors");
  std::string bytes = slurp(file);
  bytes.back() ^= 1;  // norm.count has the larger elements, so head.bias is last
  spill(file, bytes);
  Reader reader(path("c"));
  EXPECT_TRUE(at::equal(reader.read_model("norm.count"), at::tensor(int64_t{7})));
  EXPECT_THAT(checkpoint_error([&] { reader.read_model("head.bias"); }),
              HasSubstr("tensor \"head.bias\" of model-00002-of-00002.safetensors is damaged: "
                        "expected xxh64 "));
}

TEST_F(UnreadableFolderTest, OtherVersionsAreRefused) {
  save(path("c"), 1);
  EXPECT_THAT(index_with("\"format_version\": 3", "\"format_version\": 7"),
              HasSubstr("index.json\": expected format_version 3, got 7. Read it with the version "
                        "of smp that wrote it."));
}

TEST_F(UnreadableFolderTest, MalformedIndexSaysWhere) {
  const auto error = [&](const std::string& from, const std::string& to) {
    fs::remove_all(path("c"));
    save(path("c"), 1);
    return index_with(from, to);
  };
  EXPECT_THAT(error("{", "["),
              AllOf(HasSubstr("index.json\" is malformed: expected a JSON object with each "
                              "key once, got "),
                    HasSubstr(" bytes that are none. Use another checkpoint.")));
  EXPECT_THAT(error("smp-checkpoint", "other"),
              HasSubstr("index.json\" is malformed at \"format\": expected \"smp-checkpoint\", "
                        "got \"other\". Use another checkpoint."));
  EXPECT_THAT(error("\"step\": 100", "\"step\": \"x\""),
              HasSubstr("at \"step\": expected an integer, got \"x\""));
  EXPECT_THAT(error("\"step\": 100", "\"step\": -1"),
              HasSubstr("at \"step\": expected a non-negative integer, got -1"));
  // A parser would take one of the two.
  EXPECT_THAT(error("\"step\": 100", "\"step\": 100, \"step\": 7"),
              HasSubstr("is malformed: expected a JSON object with each key once"));
  EXPECT_THAT(error("[\"encoder.weight\", \"head.bias\"]", "[\"head.bias\", \"head.bias\"]"),
              HasSubstr("at \"optimizer.param_groups[0].params[1]\": expected a parameter that is "
                        "listed once, got \"head.bias\""));
  EXPECT_THAT(
      error("\"gradient_shards\"", "\"shards\""),
      HasSubstr("at its beginning: expected an object with \"gradient_shards\", got an object"));
  EXPECT_THAT(error("\"gradient_shards\": 2", "\"gradient_shards\": 0"),
              HasSubstr("at \"gradient_shards\": expected a positive number of replicas, got 0"));
  EXPECT_THAT(error("[2, 3]", "[2, 9223372036854775808]"),
              HasSubstr("at \"model.encoder.weight.shape[1]\": expected an integer >= 0, got 9"
                        "223372036854775808"));
  EXPECT_THAT(error("\"train\": 10", "\"train\": -1"),
              HasSubstr("at \"random.step_calls.train\": expected a non-negative integer, got -1"));
  EXPECT_THAT(error("\"extra\": {", "\"extra\": 1, \"x\": {"),
              HasSubstr("at \"extra\": expected an object, got 1"));
  EXPECT_THAT(error("\"seed\": ", "\"seed\": -"),
              HasSubstr("at \"random.seed\": expected a non-neg"));
  EXPECT_THAT(error("[2, 3]", "[2, -3]"),
              HasSubstr("at \"model.encoder.weight.shape[1]\": expected an integer >= 0, got -3"));
  EXPECT_THAT(error("\"dtype\": \"F32\"", "\"dtype\": \"F31\""),
              HasSubstr("at \"model.encoder.weight\": unknown dtype \"F31\""));
  EXPECT_THAT(error("\"xxh64\": \"", "\"xxh64\": \"0"),
              HasSubstr("expected 16 hexadecimal digits"));
  EXPECT_THAT(error("\"same_as\": \"encoder", "\"same_as\": \"decoder"),
              HasSubstr("at \"model.decoder.weight\": expected \"same_as\" to name a stored"));
  EXPECT_THAT(error("\"file\": \"model-00001", "\"file\": \"model-00009"),
              HasSubstr("expected a file listed under \"files\""));
  EXPECT_THAT(error("\"model-00001", "\"../model-00001"),
              HasSubstr("at \"files\": expected plain file names"));
}

TEST_F(UnreadableFolderTest, EditedIndexIsRefused) {
  save(path("c"), 1);
  std::string text = slurp(path("c/index.json"));
  spill(path("c/index.json"), text.replace(text.find("\"step\": 100"), 11, "\"step\": 900"));
  const std::string expected = with_checksum(text);
  const size_t digits = text.find("\"checksum\": \"") + 13;
  EXPECT_EQ(checkpoint_error([&] { Reader reader(path("c")); }),
            "[smp] \"" + path("c/index.json") + "\" is damaged or was edited: expected checksum " +
                expected.substr(digits, 16) + ", got " + text.substr(digits, 16) +
                ". Use another checkpoint.");
  spill(path("c/index.json"), text.replace(text.find("checksum"), 8, "chocolat"));
  EXPECT_THAT(checkpoint_error([&] { Reader reader(path("c")); }),
              HasSubstr("is damaged or was edited: expected checksum of 16 digits, got none."));
}

TEST_F(UnreadableFolderTest, DeeplyNestedJsonIsNone) {
  save(path("c"), 1);
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  EXPECT_THAT(index_with("\"epoch\": 5", "\"epoch\": " + deep),
              HasSubstr("is malformed: expected a JSON object"));
}

}  // namespace
}  // namespace smp::checkpoint
