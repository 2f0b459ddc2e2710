// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "examples/gpt/progress.h"
#include "examples/gpt/report.h"
#include "examples/gpt/settings.h"
#include "tests/error_of.h"
#include "tests/temp_folder.h"

namespace gpt {
namespace {

using smp::testing::error_of;
using smp::testing::TempFolder;

TEST(ProgressLine, ShowsAllNumbers) {
  const ProgressState state{100, 400, 2 * std::log(2.0), 12345.6, 89.2};
  EXPECT_EQ(progress_line(state),
            "[#####---------------]  25%  step 100/400  loss 1.386  2.000 bits/byte  "
            "12346 tokens/s  1:30 left");
}

TEST(ProgressLine, IsFullAtTheEnd) {
  EXPECT_EQ(progress_line({7, 7, 0, 0, 0}),
            "[####################] 100%  step 7/7  loss 0.000  0.000 bits/byte  0 tokens/s  "
            "0:00 left");
}

TEST(Progress, RewritesOneLineOnATerminal) {
  std::ostringstream out;
  Progress progress(0, 2, 10, out, /*in_place=*/true);
  progress.update(1, 1.0);
  progress.update(2, 1.0);
  const auto text = out.str();
  EXPECT_EQ(text.front(), '\r');
  EXPECT_EQ(text.find('\n'), text.size() - 1);
}

TEST(Progress, WritesFewLinesToALog) {
  std::ostringstream out;
  Progress progress(90, 100, 10, out, /*in_place=*/false);
  for (int64_t step = 91; step <= 100; ++step) progress.update(step, 1.0);
  const auto text = out.str();
  EXPECT_EQ(text.find_first_of("\r\x1b"), std::string::npos);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2);  // the first and the last step
  EXPECT_THAT(text, testing::HasSubstr("step 91/100"));
  EXPECT_THAT(text, testing::HasSubstr("step 100/100"));
}

// Ten percent of each new loss: 4.0, then 4.0 + 0.1 * (2.0 - 4.0).
TEST(Progress, SmoothsTheLoss) {
  std::ostringstream out;
  Progress progress(0, 2, 10, out, /*in_place=*/false);
  progress.update(1, 4.0);
  progress.update(2, 2.0);
  EXPECT_THAT(out.str(), testing::HasSubstr("loss 4.000"));
  EXPECT_THAT(out.str(), testing::HasSubstr("loss 3.800"));
}

TEST(LossLog, KeepsEveryBit) {
  const TempFolder folder;
  const auto file = folder.file("losses");
  LossLog(file, 0).add(0, 0.5);
  LossLog(file, 1).add(1, 1.0 / 3);
  std::ifstream stream(file);
  std::ostringstream text;
  text << stream.rdbuf();
  EXPECT_EQ(text.str(), "0 0x1p-1\n1 0x1.5555555555555p-2\n");
  EXPECT_THAT(error_of<std::exception>([&] { LossLog(folder.file("none/losses"), 0); }),
              testing::HasSubstr("losses: cannot write \"" + folder.file("none/losses") + "\""));
}

TEST(LossLog, DropsWhatIsTrainedAgain) {
  const TempFolder folder;
  const auto file = folder.file("losses");
  {
    LossLog log(file, 0);
    for (int step = 0; step < 4; ++step) log.add(step, step);
  }
  LossLog(file, 2).add(2, 0.5);
  std::ifstream stream(file);
  std::ostringstream text;
  text << stream.rdbuf();
  EXPECT_EQ(text.str(), "0 0x0p+0\n1 0x1p+0\n2 0x1p-1\n");
}

TEST(Report, ComparesWithTheTrigram) {
  EXPECT_EQ(held_out_line(1.9, 2.5),
            "held-out text: 1.900 bits/byte; a trigram model: 2.500 (0.600 lower)");
  EXPECT_EQ(held_out_line(2.6, 2.5),
            "held-out text: 2.600 bits/byte; a trigram model: 2.500 (0.100 higher)");
  EXPECT_EQ(printable("a\n\tb\x1b\x80~"), "a\n\tb??~");
}

TEST(Settings, AreReadFromTheCommandLine) {
  const char* arguments[] = {"gpt", "--layers", "6", "--data", "a", "b", "--tied", "--lr", "0.5"};
  Settings settings;
  EXPECT_FALSE(parse_command_line(9, const_cast<char**>(arguments), settings).has_value());
  EXPECT_EQ(settings.layers, 6);
  EXPECT_EQ(settings.data, (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(settings.tied);
  EXPECT_EQ(settings.lr, 0.5);
}

TEST(Settings, WrongOnesStopTheProgram) {
  const char* arguments[] = {"gpt", "--steps", "-3"};
  Settings settings;
  testing::internal::CaptureStderr();
  const auto status = parse_command_line(3, const_cast<char**>(arguments), settings);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), testing::HasSubstr("--steps"));
  ASSERT_TRUE(status.has_value());
  EXPECT_NE(*status, 0);
}

// 10 steps of warm-up, then half a cosine from lr to a tenth of it.
TEST(Settings, LearningRateWarmsUpAndDecays) {
  Settings settings;
  settings.steps = 100;
  settings.lr = 1.0;
  EXPECT_NEAR(settings.learning_rate(0), 1.0 / 11, 1e-12);
  EXPECT_NEAR(settings.learning_rate(10), 1.0, 1e-12);
  EXPECT_NEAR(settings.learning_rate(55), 0.55, 1e-12);
  EXPECT_NEAR(settings.learning_rate(100), 0.1, 1e-12);
}

}  // namespace
}  // namespace gpt
