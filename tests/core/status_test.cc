// SPDX-License-Identifier: Apache-2.0
#include "core/status.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <limits>
#include <optional>
#include <regex>
#include <thread>

#include "core/status_reader.h"
#include "core/wait_watch.h"

namespace smp::core {
namespace {

using Kind = ThreadState::Kind;
using std::chrono::hours;
using std::chrono::nanoseconds;

/// A job that no other process runs.
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
  const std::vector<std::string> hosts(10, "here");
  const auto status = status_of(0, hosts);
  const ThisRank rank(status);
  EXPECT_EQ(own_line().action, kUsersCode);
  EXPECT_FALSE(own_line().is_waiting());
  status->set_step(12);
  status->set_action(Label("receive 5F2"));
  status->set_wait(Status::Clock::now() - hours(1), Label("all_reduce"), {3, 1, 4, 1, 5, 9});
  const JobStatus job = *read_own_job();
  EXPECT_EQ(job.name, "made up");
  EXPECT_EQ(job.hosts, hosts);
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

TEST(Status, NamesAreOneLineEach) {
  StatusOwner made_up = owner(0, {"here\nthere", "\x1b[2J"});
  made_up.job = "a\nb";
  const ThisRank rank(std::make_shared<Status>(made_up, nanoseconds(0)));
  this_status()->set_action(Label("\x1b[31mred"));
  const JobStatus job = *read_own_job();
  EXPECT_EQ(job.name, "a\\nb");
  EXPECT_EQ(job.hosts, (std::vector<std::string>{"here\\nthere", "\\x1b[2J"}));
  EXPECT_EQ(job.find(0)->action, "\\x1b[31mred");
}

/// Memory as a rank's, which another program of this user may have made.
class MadeUp {
 public:
  MadeUp(const std::string& text, int seals, size_t bytes = 0) {
    if (bytes == 0) bytes = sizeof(StatusMemory) + text.size();
    fd_ = memfd_create("smp-status", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT_EQ(ftruncate(fd_, static_cast<off_t>(bytes)), 0);
    EXPECT_EQ(fcntl(fd_, F_ADD_SEALS, seals), 0);
    size_ = std::max(bytes, sizeof(StatusMemory));
    data_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    EXPECT_NE(data_, MAP_FAILED);
    if (bytes < sizeof(StatusMemory)) return;
    std::memcpy(static_cast<char*>(data_) + sizeof(StatusMemory), text.data(), text.size());
    memory().owner.magic = StatusMemory::kMagic;
    memory().owner.process = getpid();
    memory().owner.thread = getpid();
    memory().owner.text_bytes = static_cast<uint32_t>(text.size());
  }
  ~MadeUp() {
    munmap(data_, size_);
    close(fd_);
  }
  MadeUp(const MadeUp&) = delete;
  MadeUp& operator=(const MadeUp&) = delete;

  StatusMemory& memory() { return *static_cast<StatusMemory*>(data_); }

 private:
  int fd_ = -1;
  size_t size_ = 0;
  void* data_ = nullptr;
};

std::optional<JobStatus> job_called(const std::string& name) {
  for (JobStatus& job : read_jobs()) {
    if (job.name == name) return std::move(job);
  }
  return std::nullopt;
}

const std::string kMadeUpJob = "1\nmade up by hand\nprogram\nhere\nhere\n";

TEST(Status, WhatMadeUpMemoryMayNotSayIsLeftOut) {
  MadeUp made_up(kMadeUpJob, F_SEAL_SHRINK);
  StatusMemory& memory = made_up.memory();
  memory.doing.since = std::numeric_limits<int64_t>::min();
  memory.waiting.count = std::numeric_limits<uint32_t>::max();
  memory.waiting.ranks[0] = 99;
  memory.waiting.ranks[1] = -1;
  memory.waiting.ranks[2] = 1;
  const auto job = job_called("made up by hand");
  ASSERT_TRUE(job);
  EXPECT_EQ(job->find(0)->waits_for, std::vector<int>{});  // two ranks of two are none of it
  memory.waiting.ranks[0] = 1;
  const auto waiting = job_called("made up by hand");
  EXPECT_EQ(waiting->find(0)->waits_for, std::vector<int>{1});
  EXPECT_NE(status_text(*waiting).find("rank 0 waits for rank 1"), std::string::npos);
  for (const int rank : {7, 2, -1}) {
    memory.owner.rank = rank;
    EXPECT_FALSE(job_called("made up by hand")) << rank;
  }
}

TEST(Status, MemoryThatIsNoRanksIsNoJob) {
  const auto is_job = [] { return job_called("made up by hand").has_value(); };
  {
    const MadeUp as_a_rank_makes_it(kMadeUpJob, F_SEAL_SHRINK);
    EXPECT_TRUE(is_job());
  }
  {
    const MadeUp may_become_shorter(kMadeUpJob, 0);
    EXPECT_FALSE(is_job());
  }
  {
    const MadeUp too_short(kMadeUpJob, F_SEAL_SHRINK, 8);
    EXPECT_FALSE(is_job());
  }
  {
    const MadeUp longer_than_it_says(kMadeUpJob, F_SEAL_SHRINK, 1 << 20);
    EXPECT_FALSE(is_job());
  }
  {
    const MadeUp without_hosts("1\nmade up by hand\nprogram\n", F_SEAL_SHRINK);
    EXPECT_FALSE(is_job());
  }
  {
    MadeUp older(kMadeUpJob, F_SEAL_SHRINK);
    older.memory().owner.magic = StatusMemory::kMagic - 1;
    EXPECT_FALSE(is_job());
  }
}

TEST(Status, OneNumberWithOtherHostsIsAnotherJob) {
  const MadeUp first(kMadeUpJob, F_SEAL_SHRINK);
  MadeUp second("1\nmade up by hand\nprogram\n1\n2\n3\n4\n", F_SEAL_SHRINK);
  second.memory().owner.rank = 3;
  std::vector<size_t> sizes;
  for (const JobStatus& job : read_jobs()) {
    if (job.name == "made up by hand") sizes.push_back(job.hosts.size());
  }
  std::sort(sizes.begin(), sizes.end());
  EXPECT_EQ(sizes, (std::vector<size_t>{2, 4}));
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

TEST(PublicCall, IsThatOfTheOutermostScopeOfItsThread) {
  EXPECT_EQ(this_public_call().text(), "");
  const CallScope step("call 3 of step function \"train\"", "train()", kAnyStep);
  const PublicCall call = this_public_call();
  {
    const CallScope barrier("smp::barrier");
    EXPECT_EQ(this_public_call().text(), "call 3 of step function \"train\"");
  }
  std::thread([] { EXPECT_EQ(this_public_call().text(), ""); }).join();
  {
    const PublicCallScope nothing{PublicCall()};
    const CallScope save("smp::save");
    EXPECT_EQ(this_public_call().text(), "smp::save");
    EXPECT_FALSE(this_public_call().is_of_kind_of(call));
    EXPECT_FALSE(this_public_call().is_of_kind_of(PublicCall()));
  }
  EXPECT_EQ(this_public_call().text(), call.text());
}

TEST(PublicCall, ComparesKindsAndNotTexts) {
  const PublicCall third("call 3 of step function \"train\"", kAnyStep);
  EXPECT_TRUE(third.is_of_kind_of(PublicCall("call 4 of step function \"test\"", kAnyStep)));
  EXPECT_TRUE(PublicCall("smp::barrier", kOwnCollective).is_of_kind_of(PublicCall()));
  const std::string name(500, 'x');
  EXPECT_EQ(PublicCall(name, name).text(), name.substr(0, 120));
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
