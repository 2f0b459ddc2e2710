// SPDX-License-Identifier: Apache-2.0
#include "core/status.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <regex>
#include <thread>

#include "core/status_reader.h"
#include "core/wait_watch.h"

namespace smp::core {
namespace {

using Kind = ThreadState::Kind;
using std::chrono::hours;
using std::chrono::nanoseconds;

/// A job that nobody else runs.
StatusOwner owner(int rank, std::vector<std::string> hosts) {
  static int jobs = 0;
  if (rank == 0) ++jobs;
  StatusOwner owner;
  owner.job_id = std::to_string(getpid()) + "-" + std::to_string(jobs);
  owner.job = "made up";
  owner.rank = rank;
  owner.hosts = std::move(hosts);
  return owner;
}

std::shared_ptr<Status> status_of(int rank, std::vector<std::string> hosts,
                                  nanoseconds stall = nanoseconds(0)) {
  return std::make_shared<Status>(owner(rank, std::move(hosts)), stall);
}

/// Makes this thread the rank until the end of the block.
struct ThisRank {
  explicit ThisRank(std::shared_ptr<Status> status) { set_thread_status(std::move(status)); }
  ~ThisRank() { set_thread_status(nullptr); }
};

RankStatus own_line() { return *read_own_job()->find(this_status()->rank()); }

TEST(Status, OthersReadWhatARankSays) {
  const auto status = status_of(0, {"here"});
  const ThisRank rank(status);
  EXPECT_EQ(own_line().action, kUsersCode);
  EXPECT_FALSE(own_line().is_waiting());
  status->set_step(12);
  status->set_action(Label("receive 5F2"));
  status->set_wait(Status::Clock::now() - hours(1), Label("all_reduce"), {3, 1, 4, 1, 5, 9});
  const JobStatus job = *read_own_job();
  EXPECT_EQ(job.name, "made up");
  EXPECT_EQ(job.hosts, std::vector<std::string>{"here"});
  const RankStatus line = *job.find(0);
  EXPECT_EQ(line.process, getpid());
  EXPECT_EQ(line.step, 12);
  EXPECT_EQ(line.action, "receive 5F2");
  EXPECT_EQ(line.waits_for, (std::vector<int>{3, 1, 4, 1}));
  EXPECT_EQ(line.more, 2);
  EXPECT_EQ(line.wait, "all_reduce");
  EXPECT_GE(line.wait_seconds, 3600);
  EXPECT_LT(line.warned_seconds, 0);
  status->clear_wait();
  EXPECT_FALSE(own_line().is_waiting());
}

TEST(Status, ALabelIsCutOff) {
  EXPECT_EQ(Label("1234567890123456789012345").text(), "123456789012345678901234");
  EXPECT_EQ(Label("").text(), "");
}

TEST(Status, ARankOfThisHostWithoutAStatusHasEnded) {
  const ThisRank rank(status_of(0, {"here", "here", "there"}));
  const JobStatus job = *read_own_job();
  ASSERT_EQ(job.ranks.size(), 2u);
  EXPECT_EQ(job.find(1)->state.kind, Kind::kEnded);
  EXPECT_EQ(job.find(2), nullptr);
}

TEST(Status, AForkedProcessIsNoRank) {
  const ThisRank rank(status_of(0, {"here"}));
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(ends[1]);
    char byte = 0;
    _exit(read(ends[0], &byte, 1) == 0 ? 0 : 1);  // until the parent has looked
  }
  const JobStatus job = *read_own_job();
  close(ends[1]);
  waitpid(child, nullptr, 0);
  close(ends[0]);
  ASSERT_EQ(job.ranks.size(), 1u);
  EXPECT_EQ(job.ranks[0].process, getpid());
}

/// Each with the state of its own thread.
TEST(Status, RanksThatAreThreads) {
  const ThisRank rank(status_of(0, {"here", "here"}));
  std::promise<void> begun, seen;
  std::thread other([&] {
    const ThisRank here(status_of(1, {"here", "here"}));
    begun.set_value();
    seen.get_future().wait();
  });
  begun.get_future().wait();
  // The thread may be on its way into the wait.
  while (read_own_job()->find(1)->state.kind != Kind::kSleeps) std::this_thread::yield();
  EXPECT_EQ(read_own_job()->find(0)->state.kind, Kind::kComputes);
  seen.set_value();
  other.join();
}

TEST(Status, CallsInsideOfOthersBelongToThem) {
  const auto status = status_of(0, {"here"});
  const ThisRank rank(status);
  {
    const CallScope save("smp::save");
    const CallScope barrier("smp::barrier");
    EXPECT_EQ(status->call(), "smp::save");
    EXPECT_EQ(own_line().action, "smp::save");
  }
  EXPECT_EQ(status->call(), "");
  EXPECT_EQ(own_line().action, kUsersCode);
  const CallScope step("call 3 of step function \"train\"", "train()");
  EXPECT_EQ(own_line().action, "train()");
}

TEST(Status, NothingIsSaidWithoutARank) {
  const CallScope call("smp::save");
  WaitWatch wait;
  wait.look("all_reduce", {1});
  EXPECT_FALSE(read_own_job());
  EXPECT_EQ(diagnose_wait().chain, "");
}

/// A thread that works for a rank waits for it only while the rank waits for the thread.
TEST(Status, AThreadThatServesARank) {
  const auto status = status_of(0, {"here", "there"});
  const ThisRank rank(status);
  const int server = 0;
  const auto look = [&] {
    std::thread([&, shared = share_this_status()] {
      const ServingThread serving(shared, &server);
      WaitWatch wait;
      wait.look("all_reduce", {1});
      const ThisRank reader(shared);
      EXPECT_EQ(own_line().is_waiting(), status->action().text() == "served");
    }).join();
  };
  look();
  {
    status->set_action(Label("served"));
    const ServedBy served(&server);
    look();
  }
  status->set_action(Label("not served"));
  look();
}

/// Others that give up at the same time look for the cause beyond it.
TEST(WaitWatch, AWaitThatFailsIsThereUntilTheNextOneOrACall) {
  const auto status = status_of(0, {"here", "there"});
  const ThisRank rank(status);
  const auto wait = [](bool fails) {
    WaitWatch watch;
    watch.look("all_reduce", {1});
    if (fails) throw std::runtime_error("timed out");
  };
  wait(false);
  EXPECT_FALSE(own_line().is_waiting());
  EXPECT_THROW(wait(true), std::runtime_error);
  EXPECT_TRUE(own_line().is_waiting());
  wait(false);
  EXPECT_FALSE(own_line().is_waiting());
  EXPECT_THROW(wait(true), std::runtime_error);
  const CallScope call("step function \"train\"");
  EXPECT_FALSE(own_line().is_waiting());
}

std::string normal(const std::string& text) {
  const auto process = std::regex("\\b" + std::to_string(getpid()) + "\\b");
  std::string result = std::regex_replace(text, process, "PID");
  result = std::regex_replace(result, std::regex("[0-9.e-]+ (s|min|h)\\b"), "T");
  return std::regex_replace(result, std::regex(" +"), " ");
}

/// One warning, of the rank that has waited longest.
TEST(WaitWatch, OneRankWarnsOfAStall) {
  const std::vector<std::string> hosts(3, "here");
  const nanoseconds at_once(1);
  const auto zero = status_of(0, hosts, at_once), one = status_of(1, hosts),
             two = status_of(2, hosts, at_once);
  one->set_action(Label("0F1"));
  const auto watch = [](const std::shared_ptr<Status>& status) {
    set_thread_status(status);
    return std::make_unique<WaitWatch>();
  };
  const auto first = watch(two), second = watch(zero);
  const auto look = [](const std::shared_ptr<Status>& status, WaitWatch& wait) {
    const ThisRank rank(status);
    wait.look("all_reduce", {1});
  };
  ::testing::internal::CaptureStderr();
  look(two, *first);
  look(zero, *second);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "neither has waited yet";
  ::testing::internal::CaptureStderr();
  look(zero, *second);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "the other has waited longer";
  ::testing::internal::CaptureStderr();
  look(two, *first);
  EXPECT_EQ(normal(::testing::internal::GetCapturedStderr()),
            std::string("[smp] warning: rank 2 has waited for \"stall_seconds\" (T), and waits "
                        "on:\n"
                        "job made up: ") +
                program_invocation_short_name +
                ", 3 ranks, for T\n"
                " rank process step does for waits for state\n"
                " 0 PID 0 user's code T rank 1, T waits\n"
                " 1 PID 0 0F1 T computes\n"
                " 2 PID 0 user's code T rank 1, T waits\n"
                "rank 0 waits for rank 1 in all_reduce, which has been in 0F1 for T (rank 1: "
                "computes)\n");
  ::testing::internal::CaptureStderr();
  look(zero, *second);
  look(two, *first);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "one warning is enough";
}

}  // namespace
}  // namespace smp::core
