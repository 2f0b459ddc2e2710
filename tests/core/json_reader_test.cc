// SPDX-License-Identifier: Apache-2.0
#include "core/json_reader.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "core/check.h"
#include "core/json.h"
#include "tests/error_of.h"
#include "tests/temp_folder.h"

namespace smp {
namespace {

using core::JsonReader;
using testing::error_of;

class JsonReaderTest : public ::testing::Test {
 protected:
  const nlohmann::json document_ = core::parse_json(
      R"({"a": [{"b": 1}, {"b": 2.5, "c": "x", "d": true}], "big": 18446744073709551615})",
      "f.json");
  const JsonReader root_{document_, "f.json"};
};

TEST_F(JsonReaderTest, ReadsWhatIsThere) {
  EXPECT_EQ(root_.at("a").size(), 2u);
  EXPECT_EQ(root_.at("a").at(0).at("b").integer(), 1);
  EXPECT_EQ(root_.at("a").at(0).at("b").number(), 1.0);
  EXPECT_EQ(root_.at("a").at(1).at("b").number(), 2.5);
  EXPECT_EQ(root_.at("a").at(1).at("c").text(), "x");
  EXPECT_TRUE(root_.at("a").at(1).find("d")->boolean());
  EXPECT_FALSE(root_.find("z").has_value());
}

TEST_F(JsonReaderTest, ErrorsNameThePathAndWhatWasExpected) {
  const JsonReader a = root_.at("a");
  EXPECT_EQ(error_of<ConfigError>([&] { root_.at("z"); }),
            "[smp] f.json: expected an object with \"z\", got an object.");
  EXPECT_EQ(error_of<ConfigError>([&] { a.find("z"); }),
            "[smp] f.json: \"a\": expected an object, got an array of 2.");
  EXPECT_EQ(error_of<ConfigError>([&] { a.at(2); }),
            "[smp] f.json: \"a\": expected an array with an element 2, got an array of 2.");
  EXPECT_EQ(error_of<ConfigError>([&] { a.at(1).at("b").integer(); }),
            "[smp] f.json: \"a[1].b\": expected an integer, got 2.5.");
  EXPECT_EQ(error_of<ConfigError>([&] { a.at(0).at("b").integer(2); }),
            "[smp] f.json: \"a[0].b\": expected an integer >= 2, got 1.");
  EXPECT_EQ(error_of<ConfigError>([&] { a.at(0).at("b").integer(2, 3); }),
            "[smp] f.json: \"a[0].b\": expected an integer from 2 to 3, got 1.");
  EXPECT_EQ(error_of<ConfigError>([&] { root_.at("big").integer(0); }),
            "[smp] f.json: \"big\": expected an integer >= 0, got 18446744073709551615.");
  EXPECT_EQ(error_of<ConfigError>([&] { a.at(0).at("b").text(); }),
            "[smp] f.json: \"a[0].b\": expected a string, got 1.");
  EXPECT_EQ(error_of<ConfigError>([&] { a.at(1).at("c").number(); }),
            "[smp] f.json: \"a[1].c\": expected a number, got \"x\".");
  EXPECT_EQ(error_of<ConfigError>([&] { a.at(1).at("c").boolean(); }),
            "[smp] f.json: \"a[1].c\": expected true or false, got \"x\".");
  EXPECT_EQ(error_of<ConfigError>([&] { a.at(1).fail("no such thing", "Name another"); }),
            "[smp] f.json: \"a[1]\": no such thing. Name another");
}

TEST_F(JsonReaderTest, GoesOverMembersAndElements) {
  std::string seen;
  for (const auto& [name, value] : root_.members()) seen += name + " ";
  for (const JsonReader& element : root_.at("a").elements()) {
    for (const auto& [name, value] : element.members()) seen += name + value.value().dump() + " ";
  }
  EXPECT_EQ(seen, "a big b1 b2.5 c\"x\" dtrue ");
  EXPECT_EQ(root_.at("big").count(), ~uint64_t{0});
  EXPECT_TRUE(root_.has("a"));
  EXPECT_FALSE(root_.has("z"));
  EXPECT_FALSE(root_.at("big").has("a"));
  EXPECT_EQ(error_of<ConfigError>([&] { root_.elements(); }),
            "[smp] f.json: expected an array, got an object.");
  EXPECT_EQ(error_of<ConfigError>([&] { root_.at("a").members(); }),
            "[smp] f.json: \"a\": expected an object, got an array of 2.");
  EXPECT_EQ(error_of<ConfigError>([&] { root_.at("a").at(1).at("b").count(); }),
            "[smp] f.json: \"a[1].b\": expected a non-negative integer, got 2.5.");
}

/// A document may have errors of its own kind and words.
TEST_F(JsonReaderTest, DocumentsSayWhichErrorTheyHave) {
  const JsonReader root(document_, "f.json",
                        [](const auto& source, const auto& place, const auto& problem) {
                          core::fail<CheckpointError>(source, " at ", place, ": ", problem);
                        });
  EXPECT_EQ(error_of<CheckpointError>([&] { root.at("z"); }),
            "[smp] f.json at its beginning: expected an object with \"z\", got an object");
  EXPECT_EQ(error_of<CheckpointError>([&] { root.at("a").at(1).at("c").integer(); }),
            "[smp] f.json at \"a[1].c\": expected an integer, got \"x\"");
}

/// A path with the whole name would be copied for each value below it.
TEST(JsonReaderText, LongAndStrangeNamesAreCutInPaths) {
  const std::string name = "\x1b\n" + std::string((size_t{1} << 20) - 2, 'n');
  const nlohmann::json document = {{name, {1, {{name, true}}}}};
  const JsonReader root(document, "f.json");
  const auto shown_with = [](size_t bytes) {
    return "\\x1b\\n" + std::string(120 - 6, 'n') + "... (" + std::to_string(bytes) + " bytes)";
  };
  const std::string shown = shown_with(name.size());
  EXPECT_EQ(error_of<ConfigError>([&] { root.at(name).at(1).at(name).text(); }),
            "[smp] f.json: \"" + shown + "[1]." + shown + "\": expected a string, got true.");
  EXPECT_EQ(error_of<ConfigError>([&] { root.at(name + "n"); }),
            "[smp] f.json: expected an object with \"" + shown_with(name.size() + 1) +
                "\", got an object.");
}

/// The time is that of the length: a parser that is watched while it builds a tree would take
/// minutes here.
TEST(ParseJson, TakesManyObjectsInOneArray) {
  constexpr size_t kObjects = 300000;
  std::string text = "[{}";
  for (size_t i = 1; i < kObjects; ++i) text += ",{}";
  text += "]";
  EXPECT_EQ(core::parse_json(text, "f.json").size(), kObjects);
}

TEST(ReadFile, TakesRegularFilesOfASaneSize) {
  const testing::TempFolder folder;
  const auto error = [](const std::string& path) {
    return error_of<ConfigError>([&] { core::read_file(path, "the plan", 5); });
  };
  EXPECT_EQ(core::read_file(folder.write("plan", "12345"), "the plan", 5), "12345");
  EXPECT_EQ(error(folder.write("large", "123456")),
            "[smp] " + folder.file("large") +
                ": cannot read the plan: it has 6 bytes, and may have 5. "
                "Give the path of a JSON file.");
  EXPECT_EQ(error(folder.path()), "[smp] " + folder.path() +
                                      ": cannot read the plan: it is a folder. Give the path of a "
                                      "JSON file.");
  EXPECT_EQ(error(folder.file("a\nb")),
            "[smp] " + folder.path() +
                "/a\\nb: cannot read the plan: No such file or directory. "
                "Give the path of a JSON file.");
  // They would not end, or not begin.
  ASSERT_EQ(mkfifo(folder.file("pipe").c_str(), 0600), 0);
  for (const std::string& path : {std::string("/dev/zero"), folder.file("pipe")}) {
    EXPECT_EQ(error(path), "[smp] " + path +
                               ": cannot read the plan: it is no regular file. Give the "
                               "path of a JSON file.");
  }
}

TEST(WriteFile, WritesAnewOrSaysWhyNot) {
  const testing::TempFolder folder;
  const std::string path = folder.write("plan", "a longer text"), missing = folder.file("no/plan");
  core::write_file(path, "short", "cannot write the plan");
  EXPECT_EQ(core::read_file(path, "the plan"), "short");
  EXPECT_EQ(
      error_of<ConfigError>(
          [&] { core::write_file(missing, "", "cannot write the plan", "Give another one"); }),
      "[smp] " + missing + ": cannot write the plan: No such file or directory. Give another one.");
}

class ReadPipe : public ::testing::Test {
 protected:
  ReadPipe() { EXPECT_EQ(mkfifo(path_.c_str(), 0600), 0); }

  std::string error(std::chrono::milliseconds patience, uint64_t most = 1 << 20) {
    return error_of<ConfigError>(
        [&] { core::read_pipe(path_, "the configuration file", patience, most); });
  }

  const testing::TempFolder folder_;
  const std::string path_ = folder_.file("pipe");
  const std::string cannot_read_ = "[smp] " + path_ + ": cannot read the configuration file: ";
};

TEST_F(ReadPipe, TakesWhatIsWrittenUntilItIsClosed) {
  const std::string text(1 << 18, 'x');  // more than a pipe holds
  std::thread writer([&] { std::ofstream(path_) << text.substr(0, 3) << std::flush << text; });
  EXPECT_EQ(core::read_pipe(path_, "the configuration file", std::chrono::minutes(5)),
            text.substr(0, 3) + text);
  writer.join();
}

TEST_F(ReadPipe, DoesNotWaitForEver) {
  const std::string late = "it is a pipe that was not written and closed within ";
  EXPECT_EQ(error(std::chrono::milliseconds(0)),
            cannot_read_ + late + "0 s. Give the path of a JSON file.");
  EXPECT_EQ(error(std::chrono::milliseconds(10)),
            cannot_read_ + late + "0.01 s. Give the path of a JSON file.");
  const int writer = open(path_.c_str(), O_RDWR);  // never closed, as far as the reader sees
  ASSERT_EQ(write(writer, "{}", 2), 2);
  EXPECT_EQ(error(std::chrono::milliseconds(10)),
            cannot_read_ + late + "0.01 s. Give the path of a JSON file.");
  close(writer);
}

TEST_F(ReadPipe, HasAnEnd) {
  const int writer = open(path_.c_str(), O_RDWR);
  ASSERT_EQ(write(writer, "123456", 6), 6);
  EXPECT_EQ(error(std::chrono::minutes(5), /*most=*/5),
            cannot_read_ + "it has more than 5 bytes. Give the path of a JSON file.");
  close(writer);
  EXPECT_EQ(error_of<ConfigError>([&] {
              core::read_pipe(folder_.file("none"), "the configuration file",
                              std::chrono::minutes(5));
            }),
            "[smp] " + folder_.file("none") +
                ": cannot read the configuration file: No such file or directory. Give the path "
                "of a JSON file.");
}

}  // namespace
}  // namespace smp
