// SPDX-License-Identifier: Apache-2.0
// Which schedule a step runs: by name, from a file, or the one predicted to be shortest. That all
// give the numbers of one process is parity_test's.

#include <ATen/Parallel.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "pipeline/generators.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr int kScheduleSteps = 2;

/// Losses of a few steps.
Tensors train(const Config& config, int steps = kScheduleSteps, int ranks = 2) {
  Tensors losses;
  torch::manual_seed(3);
  const Mlp prototype(6);
  const auto x = torch::randn({8, MlpImpl::kWidth}), y = torch::randn({8, 1});
  run_as_threads(ranks, config, [&] {
    Mlp net(6);
    copy_values(*prototype, *net);
    DistributedModel<Mlp> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = torch::mse_loss(model(x), y);
      model->backward(loss);
      return loss;
    });
    for (int i = 0; i < steps; ++i) {
      optimizer.zero_grad();
      const auto outputs = train(x, y).outputs();
      optimizer.step();
      if (rank() == 0) losses.insert(losses.end(), outputs.begin(), outputs.end());
    }
  });
  return losses;
}

Config four_microbatches(const std::string& pipeline) {
  return stages(2).microbatches(4).pipeline(pipeline).skip_tracing(true);
}

std::string file_with(const std::string& name, const std::string& text) {
  const auto path = std::filesystem::temp_directory_path() / name;
  std::ofstream(path) << text;
  return path.string();
}

class ScheduleChoice : public ::testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_F(ScheduleChoice, RunsAScheduleFromAFile) {
  const std::string path = file_with(
      "smp_choice.csv",
      "0F0,0F1,0F2,0F3,,0I0,0I1,0W0,0W1,0B2,0B3\n1F0,1F1,1I0,1I1,1W0,1F2,1W1,1B2,1F3,1B3\n");
  expect_equal(train(four_microbatches("file").schedule_file(path)),
               train(four_microbatches("simple")), "losses");
}

TEST_F(ScheduleChoice, AFileHasToFitTheStep) {
  const std::string path = file_with("smp_unfit.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  expect_has(error_of<ConfigError>([&] { train(four_microbatches("file").schedule_file(path)); }),
             {path + ": the schedule is for 2 stages on ranks 0,1 and 2 microbatches, the step has "
                     "2 stages on ranks 0,1 and 4",
              "Set \"microbatches\" and \"virtual_stages\" as the file needs them"});
}

TEST_F(ScheduleChoice, AFileHasToBeOfAsManyRanks) {
  const std::string path = file_with("smp_ranks.csv", "0F0,0B0\n1F0,1B0\n2F0,2B0\n");
  const auto config = four_microbatches("file").microbatches(1).schedule_file(path);
  expect_has(
      error_of<ConfigError>([&] { train(config); }),
      {path + ": the schedule has rows for 3 ranks, the pipeline has 2. Set \"partitions\" as "
              "the file needs it"});
}

TEST_F(ScheduleChoice, AFileHasToHaveTheBackwardsThatAreNeeded) {
  const std::string path = file_with("smp_forwards.csv", "0F0,0F1,0B0,0B1\n1F0,1F1\n");
  const auto config = four_microbatches("file").microbatches(2).schedule_file(path);
  expect_has(error_of<ConfigError>([&] { train(config); }),
             {path + ": the schedule has no backward of some stages that need one. Write another "
                     "file."});
}

TEST_F(ScheduleChoice, AFileThatCannotRunIsRefused) {
  const std::string path = file_with("smp_stuck.csv", "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n");
  const auto config = four_microbatches("file").microbatches(2).schedule_file(path);
  expect_has(error_of<Error>([&] { train(config); }),
             {"rank 1 at action 0 (1RECV_F1<0)", "comes before 1RECV_F0<0"});
}

TEST_F(ScheduleChoice, SeveralStagesOfARank) {
  expect_equal(train(four_microbatches("breadth_first").virtual_stages(3)),
               train(four_microbatches("simple")), "losses");
  expect_equal(train(four_microbatches("interleaved").virtual_stages(2)),
               train(four_microbatches("simple")), "losses");
}

TEST_F(ScheduleChoice, OnePartitionRunsAnySchedule) {
  for (const auto& kind : pipeline::schedule_kinds()) {
    if (!kind.trains) continue;
    expect_equal(train(four_microbatches(kind.name).partitions(1), kScheduleSteps, /*ranks=*/1),
                 train(four_microbatches("simple")), kind.name);
  }
}

TEST_F(ScheduleChoice, AMemoryLimitRestrictsTheChoice) {
  expect_equal(train(four_microbatches("auto").memory_limit_mb(1)),
               train(four_microbatches("simple")), "losses");
}

TEST_F(ScheduleChoice, ATimelineShowsEveryComputeOfThreeSteps) {
  const auto path = std::filesystem::temp_directory_path() / "smp_timeline.html";
  std::filesystem::remove(path);
  train(four_microbatches("zb_h1").timeline(path.string()), 6);
  EXPECT_TRUE(std::filesystem::exists(path));
  std::ifstream trace(std::filesystem::path(path).replace_extension(".json"));
  const auto events = nlohmann::json::parse(trace).at("traceEvents");
  std::map<std::string, int> computes;
  for (const auto& event : events) {
    const bool measured = event.at("pid") == 0;  // process 1 is the prediction
    if (!measured || event.at("ph") != "X") continue;
    ++computes[event.at("name").get<std::string>().substr(0, 2)];
  }
  for (const std::string stage : {"0", "1"}) {
    const int whole = computes[stage + "B"];
    EXPECT_EQ(computes[stage + "F"], 3 * 4);
    EXPECT_EQ(whole + computes[stage + "I"], 3 * 4);
    EXPECT_EQ(whole + computes[stage + "W"], 3 * 4);
  }
}

/// They take one way in every second step only, and write the timeline of those.
TEST_F(ScheduleChoice, ATimelineIsOfStepsThatAllReplicasRun) {
  const auto path = std::filesystem::temp_directory_path() / "smp_timeline_of_replicas.html";
  std::filesystem::remove(path);
  const auto config = Config().ddp(true).timeout_seconds(60).timeline(path.string());
  run_as_threads(2, config, [&] {
    Mlp net;
    DistributedModel<Mlp> model(net);
    bool squares = true;
    auto train = step([&](torch::Tensor x) {
      const auto y = model(x);
      model->backward(squares ? y.square().mean() : y.abs().mean());
    });
    for (int i = 1; i <= 12; ++i) {
      squares = rank() == 0 || i % 2 == 1;
      train(torch::ones({2, MlpImpl::kWidth}));
    }
  });
  std::ifstream page(path);
  const std::string text{std::istreambuf_iterator<char>(page), {}};
  for (const char* name : {"step 5", "step 7", "step 9"}) {
    EXPECT_NE(text.find(name), std::string::npos) << name;
  }
  EXPECT_EQ(text.find("step 6"), std::string::npos);
}

}  // namespace
}  // namespace smp::testing
