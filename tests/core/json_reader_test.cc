// SPDX-License-Identifier: Apache-2.0
#include "core/json_reader.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "core/json.h"
#include "tests/core/error_text.h"
#include "tests/temp_folder.h"

namespace smp {
namespace {

using core::JsonReader;
using testing::error_text;

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
  EXPECT_EQ(error_text([&] { root_.at("z"); }),
            "[smp] f.json: expected an object with \"z\", got an object.");
  EXPECT_EQ(error_text([&] { a.find("z"); }),
            "[smp] f.json: \"a\": expected an object, got an array of 2.");
  EXPECT_EQ(error_text([&] { a.at(2); }),
            "[smp] f.json: \"a\": expected an array with an element 2, got an array of 2.");
  EXPECT_EQ(error_text([&] { a.at(1).at("b").integer(); }),
            "[smp] f.json: \"a[1].b\": expected an integer, got 2.5.");
  EXPECT_EQ(error_text([&] { a.at(0).at("b").integer(2); }),
            "[smp] f.json: \"a[0].b\": expected an integer >= 2, got 1.");
  EXPECT_EQ(error_text([&] { a.at(0).at("b").integer(2, 3); }),
            "[smp] f.json: \"a[0].b\": expected an integer from 2 to 3, got 1.");
  EXPECT_EQ(error_text([&] { root_.at("big").integer(0); }),
            "[smp] f.json: \"big\": expected an integer >= 0, got 18446744073709551615.");
  EXPECT_EQ(error_text([&] { a.at(0).at("b").text(); }),
            "[smp] f.json: \"a[0].b\": expected a string, got 1.");
  EXPECT_EQ(error_text([&] { a.at(1).at("c").number(); }),
            "[smp] f.json: \"a[1].c\": expected a number, got \"x\".");
  EXPECT_EQ(error_text([&] { a.at(1).at("c").boolean(); }),
            "[smp] f.json: \"a[1].c\": expected true or false, got \"x\".");
  EXPECT_EQ(error_text([&] { a.at(1).fail("no such thing", "Name another"); }),
            "[smp] f.json: \"a[1]\": no such thing. Name another");
}

TEST(ReadFile, TakesRegularFilesOfASaneSize) {
  const testing::TempFolder folder;
  const auto error = [](const std::string& path) {
    return error_text([&] { core::read_file(path, "the plan", 5); });
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

}  // namespace
}  // namespace smp
