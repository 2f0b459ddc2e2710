// SPDX-License-Identifier: Apache-2.0
// "pipeline": "auto" in training: it measures, changes its schedule between steps, and gives the
// numbers of one process all the while.

#include <ATen/Parallel.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/runtime.h"
#include "tests/action_hook.h"
#include "tests/smp/models.h"
#include "tests/smp/oracle.h"
#include "tests/smp/parity.h"
#include "tests/smp/sharded.h"
#include "tests/temp_folder.h"

namespace smp::testing {
namespace {

using parity::Layout;
using pipeline::Action;

/// A trial has three parts of four steps.
constexpr int kTrialSteps = 12;
constexpr int kSteps = kTrialSteps + 2;

void wait() { std::this_thread::sleep_for(std::chrono::milliseconds(25)); }

/// Makes actions of some kinds slow, on all replicas or one, so that the measured costs are not
/// those predicted.
struct Slow final : pipeline::Observer {
  explicit Slow(std::set<Action::Kind> those, std::optional<int> only = std::nullopt)
      : kinds(std::move(those)), replica(only) {}

  void on_end(size_t /*index*/, const Action& action) override {
    if (kinds.count(action.kind) > 0 && replica.value_or(dp_rank()) == dp_rank()) wait();
  }

  const std::set<Action::Kind> kinds;
  const std::optional<int> replica;
};

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

/// The actions that the timeline shows, of all replicas, in the order of each rank's list.
std::vector<nlohmann::json> recorded_actions() {
  const auto trace = nlohmann::json::parse(text_of(page_path().replace_extension(".json")));
  std::vector<nlohmann::json> actions;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X") actions.push_back(event);
  }
  return actions;
}

/// The kinds of their computes, as letters.
std::set<char> recorded_kinds() {
  std::set<char> kinds;
  for (const auto& action : recorded_actions()) {
    kinds.insert(action.at("name").get<std::string>()[1]);
  }
  return kinds;
}

class Auto : public ::testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    std::filesystem::remove(page_path());
  }

  /// Trains on ranks, which are observed, and compares with one process. Returns the log.
  template <class Training>
  static std::string train(Training tested, pipeline::Observer& observer) {
    tested.config.timeline(page_path().string()).skip_tracing(true);
    tested.run_ranks = [&](int ranks, const Config& config, const std::function<void()>& program) {
      run_as_threads(ranks, config, [&] {
        runtime::Runtime::get().execution.observers.push_back(&observer);
        program();
      });
    };
    ::testing::internal::CaptureStderr();
    if (tested.config.sharded_data_parallel_degree() > 1) {
      expect_as_plain(tested);
    } else {
      expect_same(tested.run_on_ranks(), tested.run_plain());
    }
    return ::testing::internal::GetCapturedStderr();
  }

  static std::string train(const Layout& layout, pipeline::Observer& observer) {
    auto tested = parity::training<TinyGpt, torch::optim::Adam>(
        layout, std::function<TinyGpt()>(tied_gpt), torch::optim::AdamOptions(1e-2));
    // Cut by memory, so that stages take unequal times and zb_h2 is predicted to be the best.
    tested.config.memory_weight(0.8);
    return train(std::move(tested), observer);
  }

  /// Two replicas that divide parameters, so that stages run in units.
  static auto divided(const std::string& pipeline, int steps) {
    return sharded_pipelines<TinyGpt, torch::optim::Adam>(
        Layout{2, 2, 4, pipeline}.with_steps(steps), Sharded{2, 2, 4},
        std::function<TinyGpt()>(tied_gpt), torch::optim::AdamOptions(1e-2));
  }
};

TEST_F(Auto, LeavesSplitBackwardsThatAreSlow) {
  Slow slow({Action::Kind::kBackwardInput, Action::Kind::kBackwardWeight});
  const auto log = train(auto_layout(1), slow);
  expect_has(log, {"\"pipeline\": \"auto\" changes from \"zb_h2\" to \""});
  expect_has(text_of(page_path()), {"auto: ", ", 2 stages, 4 microbatches"});
  EXPECT_EQ(recorded_kinds().count('I'), 0u);
  EXPECT_EQ(recorded_kinds().count('B'), 1u);
}

TEST_F(Auto, LeavesWholeBackwardsThatAreSlow) {
  Slow slow({Action::Kind::kBackward});
  train(auto_layout(1), slow);
  EXPECT_EQ(recorded_kinds().count('I'), 1u);
  EXPECT_EQ(recorded_kinds().count('B'), 0u);
}

TEST_F(Auto, ReplicasDecideTogether) {
  Slow slow({Action::Kind::kBackward}, /*only=*/1);
  train(auto_layout(2), slow);
  EXPECT_EQ(recorded_kinds().count('I'), 1u);
  EXPECT_EQ(recorded_kinds().count('B'), 0u);
}

/// Some of which run again, and are recalled from a store.
TEST_F(Auto, LeavesWholeBackwardsOfUnitsThatAreSlow) {
  auto tested = divided("auto", kSteps);
  tested.config.offload_activations(true);
  tested.prepare = [](TinyGpt& net) {
    for (auto& module : net->up) set_activation_checkpointing(module);
  };
  Slow slow({Action::Kind::kBackward}, /*only=*/1);
  const auto log = train(tested, slow);
  expect_has(log, {"Schedules by measured costs (us):\n", "\"pipeline\": \"auto\" "});
  EXPECT_EQ(recorded_kinds().count('I'), 1u);
  EXPECT_EQ(recorded_kinds().count('B'), 0u);
  EXPECT_EQ(recorded_kinds().count('U'), 1u);
}

/// Two stages on each rank.
TEST_F(Auto, LeavesSplitBackwardsOfUnitsThatAreSlow) {
  const TempFolder folder;
  const auto of_two_stages = [&](const char* pipeline, int steps) {
    auto result = divided(pipeline, steps);
    result.config.virtual_stages(2).partition_file(folder.file("plan.json"));
    return result;
  };
  Slow slow({Action::Kind::kBackwardInput, Action::Kind::kBackwardWeight});
  train(of_two_stages("interleaved_1f1b", 1), slow);
  auto tested = of_two_stages("auto", kSteps);
  tested.config.load_partition(true);
  const auto log = train(tested, slow);
  expect_has(log, {"Schedules by measured costs (us):\n", "\nnot 1f1b: "});
  EXPECT_EQ(recorded_kinds().count('I'), 0u);
  EXPECT_EQ(recorded_kinds().count('B'), 1u);
}

/// Waiting for parameters is no time of a compute.
TEST_F(Auto, AComputeBeginsWhenItsParametersAreThere) {
  ActionHook late([](const Action& action) {
    if (action.kind == Action::Kind::kForward) wait();
  });
  train(divided("1f1b", 6), late);
  std::map<std::pair<int, int>, double> ends;  // ends of the last actions of ranks
  int waits = 0;
  for (const auto& action : recorded_actions()) {
    const double begin = action.at("ts");
    double& end = ends.emplace(std::pair(action.at("pid"), action.at("tid")), begin).first->second;
    if (action.at("cat") == "forward" && begin - end >= 25'000) ++waits;
    end = begin + action.at("dur").get<double>();
  }
  EXPECT_GT(waits, 0);
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
