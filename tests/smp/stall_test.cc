// SPDX-License-Identifier: Apache-2.0
// The words of a job about ranks that wait for long.

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <regex>
#include <string>
#include <thread>

#include "smp/smp.h"
#include "tests/failure/patience.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr const char* kIsIn = "rank 1 is in ";

/// Standard error goes into a file until the end of the block.
class ErrorsInFile {
 public:
  explicit ErrorsInFile(std::string path) : path_(std::move(path)), before_(dup(STDERR_FILENO)) {
    FILE* const file = std::fopen(path_.c_str(), "w");
    dup2(fileno(file), STDERR_FILENO);
    std::fclose(file);
  }
  ~ErrorsInFile() {
    dup2(before_, STDERR_FILENO);
    close(before_);
  }

  std::string text() const {
    std::ifstream in(path_);
    return {std::istreambuf_iterator<char>(in), {}};
  }

 private:
  const std::string path_;
  const int before_;
};

/// Whether a thread of this process sleeps.
bool sleeps(long thread) {
  std::ifstream in("/proc/self/task/" + std::to_string(thread) + "/stat");
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  return text.compare(text.rfind(')') + 2, 1, "S") == 0;
}

/// From where the warning begins that names `cause` to its end, without the parts that differ from
/// run to run, such as most of the functions that a rank is in; empty as long as there is none.
std::string warning_of(const std::string& text, const std::string& cause) {
  const size_t cause_at = text.find(cause);
  const size_t end = text.find(kIsIn, cause_at);
  if (cause_at == std::string::npos || end == std::string::npos) return "";
  const size_t begin = text.rfind("[smp rank", end);
  std::string warning = text.substr(begin, text.find('\n', end) + 1 - begin);
  const auto replace = [&](const std::string& what, const std::string& by) {
    warning = std::regex_replace(warning, std::regex(what), by);
  };
  replace("\\b" + std::to_string(getpid()) + "\\b", "PID");
  replace("[0-9.]+ (s|min|h)\\b", "T");
  replace(" +", " ");
  replace(std::string(kIsIn) + ".* < smp::testing::.*::stays_in_its_own_code < .*",
          std::string(kIsIn) + "... < stays_in_its_own_code < ...");
  return warning;
}

[[gnu::noinline]] void stays_in_its_own_code(std::future<void> until) { until.get(); }

/// Two ranks of which the second stays in its own code after the second step, asleep, until there
/// is a warning of it; the other does `call` meanwhile.
std::string warning_while(const std::function<void(const std::function<void()>& step)>& call) {
  const std::string cause = "(rank 1: sleeps in futex)\n";
  std::string warning;
  const ErrorsInFile errors(::testing::TempDir() + "stall.log");
  std::promise<void> asleep, warned;
  const auto watch = [&](long thread) {
    while (!sleeps(thread)) std::this_thread::yield();
    asleep.set_value();
    while (warning.empty()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      warning = warning_of(errors.text(), cause);
    }
    warned.set_value();
  };
  const auto config = Config().partitions(2).microbatches(2).stall_seconds(0.2);
  torch::set_num_threads(1);
  run_as_threads(2, config, [&] {
    torch::manual_seed(1);
    Mlp net(3);
    DistributedModel<Mlp> model(net);
    auto train = smp::step(
        [&](torch::Tensor x) {
          auto loss = model(x).sum();
          model->backward(loss);
          return loss;
        },
        StepOptions().name("train"));
    const auto step = [&] { train(torch::ones({4, MlpImpl::kWidth})); };
    step();
    step();
    if (rank() == 0) {
      asleep.get_future().wait();
      call(step);
    } else {
      std::thread watcher(watch, syscall(SYS_gettid));
      stays_in_its_own_code(warned.get_future());
      watcher.join();
      call(step);
    }
  });
  return warning;
}

std::string expected(const std::string& does, const std::string& step, const std::string& chain) {
  return "[smp rank 0 pp 0/2] warning: rank 0 has waited for \"stall_seconds\" (T), and waits on:\n"
         "job PID: stall_test, 2 ranks, for T\n"
         " rank process step does for waits for state\n"
         " 0 PID " +
         step + " " + does +
         " T rank 1, T waits\n"
         " 1 PID 2 user's code T sleeps in futex\n"
         "rank 0 waits for rank 1 in " +
         chain +
         ", which has been in the user's code after step 2 for T (rank 1: sleeps in futex)\n"
         "rank 1 is in ... < stays_in_its_own_code < ...\n";
}

TEST(Stall, ARankThatStaysInItsOwnCode) {
  EXPECT_EQ(warning_while([](const auto& step) { step(); }),
            expected("train()", "3", "all_gather of train()"));
}

TEST(Stall, ACollectiveThatTheOtherDoesNotCall) {
  EXPECT_EQ(warning_while([](const auto&) { barrier(); }),
            expected("smp::barrier", "2", "smp::barrier"));
}

/// The mistake is `if (rank == 0) evaluate(...)`: the error names the call.
TEST(Stall, AStepThatOnlyOneRankCalls) {
  std::promise<void> ends;
  const auto text = error_of_run<CommError>(2, Config().partitions(2).microbatches(2), [&] {
    Mlp net(3);
    DistributedModel<Mlp> model(net);
    auto evaluate =
        smp::step([&](torch::Tensor x) { return model(x); }, StepOptions().name("evaluate"));
    const auto x = torch::ones({4, MlpImpl::kWidth});
    evaluate(x);
    if (rank() == 1) {
      ends.set_value();
      return;
    }
    ends.get_future().wait();
    wait_at_most(std::chrono::seconds(2));
    evaluate(x);
  });
  expect_has(text,
             {"all_gather of ", " in call 2 of step function \"evaluate\" was not complete",
              "it waits for rank 1. The chain of waits: rank 0 waits for rank 1 in all_gather "
              "of evaluate(), which has ended. Check that"});
}

}  // namespace
}  // namespace smp::testing
