// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/failure.h"
#include "core/log.h"
#include "core/stop_request.h"

namespace smp {
namespace {

using core::Failure;
using core::kFailureDirVariable;
using core::read_failures;
using core::record_failure;

namespace fs = std::filesystem;

fs::path fresh_folder(const char* name) {
  const fs::path folder = fs::path(::testing::TempDir()) / name;
  fs::remove_all(folder);
  fs::create_directory(folder);
  return folder;
}

[[noreturn]] void pause_for_ever() {
  for (;;) pause();
}

/// A process reads the level once, so each is of its own.
[[noreturn]] void log_all(const char* level) {
  setenv("SMP_LOG_LEVEL", level, 1);
  core::log_debug("a");
  core::log_info("b");
  core::set_error_context("smp rank 3");
  core::log_warning("c");
  core::log_error("d\ne\x1b");
  std::exit(0);
}

TEST(LogDeathTest, LinesCarryTheRankAndTheLevel) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(log_all("debug"), ::testing::ExitedWithCode(0),
              "^\\[smp\\] debug: a\n\\[smp\\] b\n"
              "\\[smp rank 3\\] warning: c\n\\[smp rank 3\\] error: d\ne\\\\x1b\n$");
}

TEST(LogDeathTest, LinesBelowTheLevelAreDropped) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(log_all("error"), ::testing::ExitedWithCode(0),
              "^\\[smp rank 3\\] error: d\ne\\\\x1b\n$");
}

TEST(LogDeathTest, OtherLevelsAreReportedOnce) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(log_all("verbose"), ::testing::ExitedWithCode(0),
              "^\\[smp\\] warning: SMP_LOG_LEVEL: expected debug, info, warning or error, got "
              "\"verbose\"; using info.\n\\[smp\\] b\n"
              "\\[smp rank 3\\] warning: c\n\\[smp rank 3\\] error: d\ne\\\\x1b\n$");
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

// The error that comm/operation.cc throws.
class TimedOut final : public TimeoutError, public core::FailedWait {
 public:
  TimedOut()
      : TimeoutError("line one\nline two"),
        FailedWait(Failure::Kind::kTimedOut, {0, 5}, core::StallCause{5, "is stopped; it has"}) {}
  [[noreturn]] void throw_with(const std::string&) const override { throw *this; }
};

TEST(Failure, TheFirstCallOfAProcessWrites) {
  const fs::path folder = fresh_folder("failure");
  unsetenv(kFailureDirVariable);
  record_failure(1, "without a folder nothing happens");
  EXPECT_TRUE(read_failures(folder.string()).empty());
  EXPECT_FALSE(core::is_recorded("without a folder nothing happens"));

  setenv(kFailureDirVariable, folder.c_str(), 1);
  record_failure(2, TimedOut());
  record_failure(2, "a consequence");
  record_failure(3, "another rank of this process");
  EXPECT_TRUE(core::is_recorded("line one\nline two"));
  EXPECT_FALSE(core::is_recorded("a consequence"));

  const auto failures = read_failures(folder.string());
  ASSERT_EQ(failures.size(), 1);
  const Failure& failure = failures.front();
  EXPECT_EQ(failure.rank, 2);
  EXPECT_EQ(failure.kind, Failure::Kind::kTimedOut);
  EXPECT_EQ(failure.missing, (std::vector<int>{0, 5}));
  ASSERT_TRUE(failure.cause);
  EXPECT_EQ(failure.cause->rank, 5);
  EXPECT_EQ(failure.cause->how, "is stopped; it has");
  EXPECT_EQ(failure.message, "line one\nline two");
  EXPECT_EQ(failure.order, 0);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 2)
      << "no temporary file is left beside the record and its number";
  unsetenv(kFailureDirVariable);
}

/// Records a failure as another rank's process does.
[[noreturn]] void fail_as(int rank) {
  record_failure(rank, "rank " + std::to_string(rank) + " fails");
  std::_Exit(0);
}

/// The clocks of their hosts may differ, so no record has a time. A death test comes before those
/// in which this process leaves a record itself.
TEST(FailureDeathTest, RecordsAreNumbered) {
  const fs::path folder = fresh_folder("numbered");
  setenv(kFailureDirVariable, folder.c_str(), 1);
  const std::vector<int> ranks{5, 0, 12, 3};
  for (const int rank : ranks) EXPECT_EXIT(fail_as(rank), ::testing::ExitedWithCode(0), "");
  unsetenv(kFailureDirVariable);
  std::vector<int> read;
  for (const Failure& failure : read_failures(folder.string())) read.push_back(failure.rank);
  EXPECT_EQ(read, ranks);
  std::ifstream third(folder / "12");
  const std::string text(std::istreambuf_iterator<char>(third), {});
  EXPECT_EQ(text, "2 own\nrank 12 fails");
}

TEST(Failure, RecordsAreReadInTheirOrder) {
  const fs::path folder = fresh_folder("failures");
  std::ofstream(folder / "0") << "2 heard 4\nsecond";
  std::ofstream(folder / "7") << "1 own\nfirst";
  std::ofstream(folder / "8") << "10 peer_ended 7\nthird";
  std::ofstream(folder / "4") << "not a number\nnot a record";
  std::ofstream(folder / "5") << "0 unknown\nnot a record";
  std::ofstream(folder / "order.2");
  std::ofstream(folder / ".123") << "1 own\nan unfinished record";
  const auto failures = read_failures(folder.string());
  ASSERT_EQ(failures.size(), 3);
  EXPECT_EQ(failures[0].rank, 7);
  EXPECT_EQ(failures[0].message, "first");
  EXPECT_EQ(failures[0].kind, Failure::Kind::kOwn);
  EXPECT_TRUE(failures[0].missing.empty());
  EXPECT_EQ(failures[1].kind, Failure::Kind::kHeard);
  EXPECT_EQ(failures[1].missing, std::vector<int>{4});
  EXPECT_FALSE(failures[1].cause);
  EXPECT_EQ(failures[2].kind, Failure::Kind::kPeerEnded);
  EXPECT_TRUE(read_failures((folder / "missing").string()).empty());
}

TEST(Failure, MessagesAreWithoutBacktracesUnlessAskedFor) {
  const auto message = [] {
    try {
      TORCH_CHECK(false, "shapes do not match");
    } catch (const std::exception& error) {
      return core::message_of(error);
    }
    return std::string();
  };
  EXPECT_EQ(message(), "shapes do not match");
  setenv("SMP_BACKTRACE", "1", 1);
  EXPECT_NE(message().find("Exception raised from"), std::string::npos);
  unsetenv("SMP_BACKTRACE");
  EXPECT_EQ(core::message_of(std::runtime_error("no file")), "no file");
}

/// SIGTERM to this process as often as `count` says, and then `status`, if it still lives.
[[noreturn]] void end_after_signals(std::chrono::milliseconds grace, int count, int status) {
  core::take_stop_requests(grace);
  if (core::stop_is_requested()) std::_Exit(1);
  for (int i = 0; i < count; ++i) std::raise(SIGTERM);
  if (core::stop_is_requested() != (count > 0)) std::_Exit(2);
  if (status == 0) pause_for_ever();
  std::_Exit(status);
}

TEST(StopRequestDeathTest, SigtermAsksAndDoesNotEnd) {
  constexpr std::chrono::hours kHour{1};
  EXPECT_EXIT(end_after_signals(kHour, 0, 7), ::testing::ExitedWithCode(7), "");
  EXPECT_EXIT(end_after_signals(kHour, 1, 7), ::testing::ExitedWithCode(7), "");
  EXPECT_EXIT(end_after_signals(kHour, 2, 7), ::testing::ExitedWithCode(7), "") << "sent by two";
}

TEST(StopRequestDeathTest, SigtermEndsWhenTheTimeIsOver) {
  constexpr std::chrono::milliseconds kSoon{50};
  EXPECT_EXIT(end_after_signals(kSoon, 1, 0), ::testing::KilledBySignal(SIGTERM), "");
}

/// Ends them like a pool of workers ends its processes.
TEST(StopRequestDeathTest, SigtermEndsForkedProcesses) {
  const auto fork_and_end = [] {
    core::take_stop_requests(std::chrono::hours(1));
    const pid_t child = fork();
    if (child == 0) pause_for_ever();
    kill(child, SIGTERM);
    int status = 0;
    waitpid(child, &status, 0);
    std::_Exit(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM ? 7 : 1);
  };
  EXPECT_EXIT(fork_and_end(), ::testing::ExitedWithCode(7), "");
}

/// The messages are files in its folder.
TEST(StopRequest, TheLauncherAsksAndHears) {
  const std::string folder = fresh_folder("stop");
  EXPECT_FALSE(core::ask_to_stop(folder + "/missing"));
  EXPECT_TRUE(core::ask_to_stop(folder));
  EXPECT_FALSE(core::stop_is_requested()) << "of another launcher";
  core::note_stopping();  // no launcher reads it
  EXPECT_FALSE(core::is_stopping(folder));
  setenv(kFailureDirVariable, folder.c_str(), 1);
  EXPECT_TRUE(core::stop_is_requested());
  core::note_stopping();
  unsetenv(kFailureDirVariable);
  EXPECT_TRUE(core::is_stopping(folder));
  EXPECT_TRUE(read_failures(folder).empty());
}

}  // namespace
}  // namespace smp
