// SPDX-License-Identifier: Apache-2.0
// "pipeline": "auto" in training: it measures, changes its schedule between steps, and gives the
// numbers of one process all the while.

#include <ATen/Parallel.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>

#include "runtime/runtime.h"
#include "tests/action_hook.h"
#include "tests/smp/models.h"
#include "tests/smp/oracle.h"
#include "tests/smp/parity.h"

namespace smp::testing {
namespace {

using parity::Layout;
using pipeline::Action;

/// A trial has three parts of four steps.
constexpr int kTrialSteps = 12;
constexpr int kSteps = kTrialSteps + 2;

/// Makes actions of some kinds slow, so that the measured costs are not those predicted.
ActionHook::Function slow(std::set<Action::Kind> kinds) {
  return [kinds = std::move(kinds)](const Action& action) {
    if (kinds.count(action.kind) > 0) std::this_thread::sleep_for(std::chrono::milliseconds(25));
  };
}

Layout auto_layout(int replicas) { return Layout{2, replicas, 4, "auto"}.with_steps(kSteps); }

/// The page of the test that runs; the trace lies beside it.
std::filesystem::path page_path() {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  return std::filesystem::temp_directory_path() /
         (std::string("smp_auto_") + test->name() + ".html");
}

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The kinds of computes that the timeline shows, as letters, of all replicas.
std::set<char> recorded_kinds() {
  const auto trace = nlohmann::json::parse(text_of(page_path().replace_extension(".json")));
  std::set<char> kinds;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X") kinds.insert(event.at("name").get<std::string>()[1]);
  }
  return kinds;
}

class Auto : public ::testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    std::filesystem::remove(page_path());
  }

  /// Trains on ranks with that hook and compares with one process. Returns the log.
  static std::string train(const Layout& layout, const ActionHook::Function& hook) {
    ::testing::internal::CaptureStderr();
    parity::check<TinyGpt, torch::optim::Adam>(
        layout, std::function<TinyGpt()>([] { return TinyGpt(true); }),
        torch::optim::AdamOptions(1e-2),
        [&](int ranks, const Config& config, const std::function<void()>& program) {
          // Cut by memory, so that stages take unequal times and zb_h2 is predicted to be the best.
          const auto recorded =
              Config(config).timeline(page_path().string()).skip_tracing(true).memory_weight(0.8);
          run_as_threads(ranks, recorded, [&] {
            ActionHook observer(hook);
            runtime::Runtime::get().execution.observers.push_back(&observer);
            program();
          });
        });
    return ::testing::internal::GetCapturedStderr();
  }
};

TEST_F(Auto, LeavesSplitBackwardsThatAreSlow) {
  const auto log =
      train(auto_layout(1), slow({Action::Kind::kBackwardInput, Action::Kind::kBackwardWeight}));
  expect_has(log, {"\"pipeline\": \"auto\" changes from \"zb_h2\" to \""});
  expect_has(text_of(page_path()), {"auto: ", ", 2 stages, 4 microbatches"});
  EXPECT_EQ(recorded_kinds().count('I'), 0u);
  EXPECT_EQ(recorded_kinds().count('B'), 1u);
}

TEST_F(Auto, LeavesWholeBackwardsThatAreSlow) {
  train(auto_layout(1), slow({Action::Kind::kBackward}));
  EXPECT_EQ(recorded_kinds().count('I'), 1u);
  EXPECT_EQ(recorded_kinds().count('B'), 0u);
}

TEST_F(Auto, ReplicasDecideTogether) {
  // On one of them only.
  const auto slow_action = slow({Action::Kind::kBackward});
  train(auto_layout(2), [&](const Action& action) {
    if (dp_rank() == 1) slow_action(action);
  });
  EXPECT_EQ(recorded_kinds().count('I'), 1u);
  EXPECT_EQ(recorded_kinds().count('B'), 0u);
}

/// Losses of two replicas, the second of which takes another way through its model now and then.
Tensors train_two_ways(const std::string& pipeline) {
  Tensors losses(2 * 2 * kSteps * 2);
  std::mutex mutex;
  torch::manual_seed(3);
  const Mlp prototype(6);
  const auto x = torch::randn({8, MlpImpl::kWidth}), y = torch::randn({8, 1});
  run_as_threads(4, stages(2).ddp(true).pipeline(pipeline).skip_tracing(true), [&] {
    Mlp net(6);
    copy_values(*prototype, *net);
    DistributedModel<Mlp> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    auto train = make_training(model);
    for (int i = 0; i < 2 * kSteps; ++i) {
      net->depth = dp_rank() == 1 && i % 5 > 2 ? 4 : 6;
      optimizer.zero_grad();
      const auto outputs = train(part(x, 2, dp_rank()), part(y, 2, dp_rank())).outputs();
      optimizer.step();
      const std::lock_guard<std::mutex> lock(mutex);
      for (size_t m = 0; m < 2; ++m) {
        losses[static_cast<size_t>((i * 2 + dp_rank()) * 2) + m] = outputs[m];
      }
    }
  });
  return losses;
}

TEST_F(Auto, CountsOnlyStepsInWhichAllReplicasRunTheSame) {
  ::testing::internal::CaptureStderr();
  const auto losses = train_two_ways("auto");
  const auto log = ::testing::internal::GetCapturedStderr();
  expect_equal(losses, train_two_ways("simple"), "losses");
  expect_has(log, {"Schedules by measured costs"});
}

}  // namespace
}  // namespace smp::testing
