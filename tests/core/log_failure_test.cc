// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/check.h"
#include "core/failure.h"
#include "core/log.h"

namespace smp {
namespace {

using core::first_failure;
using core::kFailureDirVariable;
using core::record_failure;

namespace fs = std::filesystem;

fs::path fresh_folder(const char* name) {
  const fs::path folder = fs::path(::testing::TempDir()) / name;
  fs::remove_all(folder);
  fs::create_directory(folder);
  return folder;
}

TEST(Log, LinesCarryTheRankAndTheLevel) {
  core::set_error_context("smp rank 3");
  EXPECT_EQ(core::log_line(core::LogLevel::kInfo, "text"), "[smp rank 3] text\n");
  EXPECT_EQ(core::log_line(core::LogLevel::kWarning, "text"), "[smp rank 3] warning: text\n");
  core::set_error_context("");
  EXPECT_EQ(core::log_line(core::LogLevel::kError, "text"), "[smp] error: text\n");
}

TEST(Log, LevelNames) {
  bool recognised = false;
  EXPECT_EQ(core::parse_log_level("debug", &recognised), core::LogLevel::kDebug);
  EXPECT_TRUE(recognised);
  EXPECT_EQ(core::parse_log_level("warning"), core::LogLevel::kWarning);
  EXPECT_EQ(core::parse_log_level("verbose", &recognised), core::LogLevel::kInfo);
  EXPECT_FALSE(recognised);
}

TEST(Log, LinesBelowTheLevelAreDropped) {
  // The level is read once, so this is the only test that may use it.
  setenv("SMP_LOG_LEVEL", "warning", 1);
  ::testing::internal::CaptureStderr();
  core::log_debug("a");
  core::log_info("b");
  core::log_warning("c");
  core::log_error("d");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "[smp] warning: c\n[smp] error: d\n");
}

TEST(InternalAssert, SaysWhereAndAsksForAReport) {
  core::set_error_context("smp rank 1");
  try {
    const int parts = 3;
    SMP_INTERNAL_ASSERT(parts == 2, "parts of a whole: ", parts);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("[smp rank 1] internal error at "), 0u) << text;
    EXPECT_NE(text.find("log_failure_test.cc:"), std::string::npos) << text;
    EXPECT_NE(text.find("parts == 2: parts of a whole: 3. This is a bug in smp; please report it "
                        "with this message."),
              std::string::npos)
        << text;
  }
  core::set_error_context("");
}

TEST(Failure, TheFirstCallOfAProcessWrites) {
  const fs::path folder = fresh_folder("failure");
  unsetenv(kFailureDirVariable);
  record_failure(1, "without a folder nothing happens");
  EXPECT_FALSE(first_failure(folder.string()));

  setenv(kFailureDirVariable, folder.c_str(), 1);
  const auto before = std::chrono::system_clock::now().time_since_epoch();
  record_failure(2, "line one\nline two");
  record_failure(2, "a consequence");
  record_failure(3, "another rank of this process");
  const auto after = std::chrono::system_clock::now().time_since_epoch();

  const auto failure = first_failure(folder.string());
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->rank, 2);
  EXPECT_EQ(failure->message, "line one\nline two");
  EXPECT_GE(failure->time_ns, std::chrono::nanoseconds(before).count());
  EXPECT_LE(failure->time_ns, std::chrono::nanoseconds(after).count());
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1)
      << "no temporary file is left";
  unsetenv(kFailureDirVariable);
}

TEST(Failure, TheEarliestRecordIsTheCause) {
  const fs::path folder = fresh_folder("failures");
  std::ofstream(folder / "0") << "1700000000000000002\nsecond";
  std::ofstream(folder / "7") << "1700000000000000001\nfirst";
  std::ofstream(folder / "4") << "not a time\nnot a record";
  std::ofstream(folder / ".123") << "1\nan unfinished record";
  const auto failure = first_failure(folder.string());
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->rank, 7);
  EXPECT_EQ(failure->message, "first");
  EXPECT_FALSE(first_failure((folder / "missing").string()));
}

}  // namespace
}  // namespace smp
