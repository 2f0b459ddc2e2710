// SPDX-License-Identifier: Apache-2.0
// Which functions a rank is in.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/stack_request.h"
#include "core/status.h"
#include "core/status_reader.h"
#include "core/symbols.h"

namespace smp::core {
namespace {

using Names = std::vector<std::string>;
using ::testing::Contains;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(ShortName, HasNoArguments) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"main", "main"},
      {"load_batch(int, std::string const&)", "load_batch"},
      {"void run<int, (anonymous namespace)::Of<char> >(int)", "run"},
      {"std::vector<int, std::allocator<int> >::at(unsigned long) const", "std::vector::at"},
      {"(anonymous namespace)::Loader::next()", "(anonymous namespace)::Loader::next"},
      {"main::{lambda(at::Tensor)#1}::operator()(at::Tensor) const", "main::{lambda}::operator()"},
      {"std::function<void (int)>::operator()(int) const", "std::function::operator()"},
      {"A::operator<<(B const&)", "A::operator<<"},
      {"A::operator->() const", "A::operator->"},
      {"bool std::operator==<char, A<char> >(A<char> const&)", "std::operator=="},
      {"bool A::operator< <char>(A const&)", "A::operator<"},
      {"A::operator bool() const", "A::operator bool"},
      {"std::ostream& std::operator<< <char, std::traits<char> >(std::ostream&)",
       "std::operator<<"},
      {"auto main::{lambda(auto:1)#1}::operator()<unsigned long>(unsigned long)",
       "main::{lambda}::operator()"},
      {"train(int)::{lambda()#1}::operator()() const", "train::{lambda}::operator()"},
      {"decltype (a(b)) std::begin<A>(A&)", "std::begin"},
      {"run_operator<int>(int)", "run_operator"},
      {"decltype(auto) std::visit<F>(F&&)", "std::visit"},
      {"non-virtual thunk to A::f()", "A::f"},
      {"operator", "operator"},
      {"f<", "f"},
      {"", ""},
  };
  for (const auto& [demangled, expected] : cases) EXPECT_EQ(short_name(demangled), expected);
}

TEST(Plumbing, IsLeftOut) {
  EXPECT_EQ(without_plumbing({"read", "load", "main", "__libc_start_call_main", "libc.so.6+0x12"}),
            (Names{"read", "load", "main"}));
  EXPECT_EQ(without_plumbing({"syscall", "std::future::get", "std::__basic_future::wait", "load",
                              "std::invoke", "std::__invoke", "std::thread::run", "libc.so.6+0x1"}),
            (Names{"syscall", "std::future::get", "load", "std::invoke"}));
  EXPECT_EQ(without_plumbing({"0x12", "load", "gpt+0x34"}), (Names{"0x12", "load"}));
  EXPECT_EQ(without_plumbing({"gpt+0x34"}), Names{});
  EXPECT_EQ(without_plumbing({}), Names{});
}

TEST(FunctionNames, AreThoseOfTheProgramAndItsLibraries) {
  const auto in_library = reinterpret_cast<uint64_t>(dlsym(RTLD_DEFAULT, "getenv"));
  ASSERT_NE(in_library, 0);
  EXPECT_EQ(function_names(getpid(), {in_library, in_library + 1}), (Names{"getenv", "getenv"}))
      << "what returns to the second instruction was called in the first";
  EXPECT_EQ(function_names(getpid(), {0x10}), Names{"0x10"});
}

/// Where a rank stays until a pipe ends.
[[gnu::noinline]] ssize_t stays_here(std::promise<void>& begun, int pipe) {
  char byte = 0;
  begun.set_value();
  return read(pipe, &byte, 1);
}

/// Runs `look` while rank 1 of a job sleeps in `stays_here`, after `before`, and rank 0, this
/// thread, waits for it.
void while_rank_1_sleeps(
    const std::function<void()>& look, const std::function<void()>& before = [] {}) {
  static int jobs = 0;
  StatusOwner owner;
  owner.job_id = std::to_string(getpid()) + "-stack-" + std::to_string(++jobs);
  owner.job = "stack";
  owner.hosts = {"here", "here"};
  const auto zero = std::make_shared<Status>(owner, std::chrono::nanoseconds(0));
  set_thread_status(zero);
  std::promise<void> begun;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  std::thread other([&] {
    owner.rank = 1;
    set_thread_status(std::make_shared<Status>(owner, std::chrono::nanoseconds(0)));
    before();
    EXPECT_EQ(stays_here(begun, ends[0]), 0);
    set_thread_status(nullptr);
  });
  begun.get_future().wait();
  while (read_own_job()->find(1)->state.kind != ThreadState::Kind::kSleeps) {
    std::this_thread::yield();
  }
  zero->set_wait(Status::Clock::now(), Label("all_reduce"), {1});
  look();
  close(ends[1]);
  other.join();
  close(ends[0]);
  set_thread_status(nullptr);
}

TEST(StackRequest, ARankOnWhichOthersWaitSaysWhereItIs) {
  while_rank_1_sleeps([] {
    JobStatus job = *read_own_job();
    EXPECT_THAT(job.find(1)->stack, IsEmpty()) << "nobody has asked";
    ask_for_stacks(job);
    EXPECT_THAT(job.find(1)->stack, Contains("smp::core::(anonymous namespace)::stays_here"));
    EXPECT_THAT(job.find(1)->stack, Not(Contains("smp::core::(anonymous namespace)::answer")));
    EXPECT_THAT(job.find(0)->stack, IsEmpty()) << "it waits";
    EXPECT_THAT(status_text(job), ::testing::HasSubstr("\nrank 1 is in "));
  });
}

TEST(StackRequest, ThatOfAWaitHasTheCauseSaid) {
  while_rank_1_sleeps([] {
    EXPECT_THAT(
        diagnose_wait().cause->how,
        ::testing::MatchesRegex("sleeps.*; it has been in the user's code for .* s, and is "
                                "in .* < smp::core::\\(anonymous namespace\\)::stays_here < "
                                ".*"));
  });
}

/// A stopped rank could not answer, and one that has been stopped would answer long after.
TEST(StackRequest, ARankThatIsStoppedIsNotAsked) {
  while_rank_1_sleeps([] {
    JobStatus job = *read_own_job();
    for (RankStatus& one : job.ranks) {
      if (one.rank == 1) one.state.kind = ThreadState::Kind::kStopped;
    }
    ask_for_stacks(job);
    EXPECT_THAT(job.find(1)->stack, IsEmpty());
  });
}

/// Handles it like Go's runtime, which takes every SIGURG for its own.
TEST(StackRequest, AHandlerThatTheProgramInstallsLaterIsNotCalled) {
  static std::atomic<int> calls{0};
  struct sigaction ours = {};
  ASSERT_EQ(sigaction(SIGURG, nullptr, &ours), 0);
  const auto install = [] {
    signal(SIGURG, [](int) { ++calls; });
    const CallScope call("smp::save");
  };
  while_rank_1_sleeps(
      [] {
        JobStatus job = *read_own_job();
        ask_for_stacks(job);
        EXPECT_THAT(job.find(1)->stack, IsEmpty());
      },
      install);
  sigaction(SIGURG, &ours, nullptr);
  EXPECT_EQ(calls, 0);
}

TEST(StackRequest, TheProgramsOwnHandlerStays) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process that has not asked before
  EXPECT_EXIT(
      {
        signal(SIGURG, SIG_IGN);
        std::_Exit(answer_stack_requests() || signal(SIGURG, SIG_DFL) != SIG_IGN ? 1 : 0);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace smp::core
