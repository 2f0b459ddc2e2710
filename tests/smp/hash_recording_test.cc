// SPDX-License-Identifier: Apache-2.0
// `record_hashes` and smp_diff, on runs in several layouts.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "smp/smp.h"
#include "tests/command.h"
#include "tests/error_of.h"
#include "tests/smp/faulty_gelu.h"
#include "tests/smp/models.h"

namespace smp::testing {
namespace {

namespace fs = std::filesystem;
using Pass = GeluFault::Pass;

constexpr int kMicrobatches = 4;  // microbatches of all replicas
constexpr int kSteps = 3;

std::string folder(const std::string& name) {
  return (fs::path(::testing::TempDir()) / "hash_recording" / name).string();
}

/// A program that trains and evaluates on some ranks, recorded in a folder of that name.
struct Recorded {
  std::string name;
  int stages = 1;
  int replicas = 1;
  std::string pipeline = "1f1b";
  int layers = 4;  ///< layers of the model
  int degree = 1;  ///< sharded_data_parallel_degree
  /// Called on each rank before a step.
  std::function<void(int step)> before = [](int) {};

  void run() const {
    torch::set_num_threads(1);
    fs::remove_all(folder(name));
    const auto config = Config()
                            .partitions(stages)
                            .microbatches(kMicrobatches / replicas)
                            .pipeline(pipeline)
                            .ddp(replicas > 1)
                            .sharded_data_parallel_degree(degree)
                            .sdp_param_persistence_threshold(100)
                            .sdp_max_live_parameters(1)
                            .sdp_gradient_clipping(1e9)
                            .gradient_shards(2)
                            .memory_weight(1)
                            .seed(7)
                            .timeout_seconds(60)
                            .record_hashes(folder(name));
    torch::manual_seed(5);
    std::vector<TinyGpt> nets;
    const auto batch = TinyGptImpl::batch(2 * kMicrobatches);
    for (int i = 0; i < stages * replicas; ++i) nets.emplace_back(/*tied=*/true, layers);
    run_as_threads(stages * replicas, config, [&] {
      GeluFault::clear();
      DistributedModel<TinyGpt> model(nets[rank()]);
      DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(),
                                                        torch::optim::SGDOptions(0.1));
      auto train = step(
          [&](torch::Tensor x, torch::Tensor y) {
            auto loss = TinyGptImpl::criterion(model(x), y);
            model->backward(loss);
            return loss;
          },
          StepOptions().name("train"));
      auto evaluate = step(
          [&](torch::Tensor x, torch::Tensor y) { return TinyGptImpl::criterion(model(x), y); },
          StepOptions().name("evaluate"));
      const int64_t size = batch[0].size(0) / dp_size();
      const auto x = batch[0].narrow(0, dp_rank() * size, size);
      const auto y = batch[1].narrow(0, dp_rank() * size, size);
      for (int i = 0; i < kSteps; ++i) {
        before(i);
        optimizer.zero_grad();
        train(x, y);
        optimizer.step();
        evaluate(x, y);
      }
    });
  }
};

Outcome diff(const std::string& a, const std::string& b) {
  return run_command("tools/smp_diff " + folder(a) + " " + folder(b) + " 2>&1");
}

class HashRecording : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { Recorded{"one"}.run(); }
};

TEST_F(HashRecording, OfAnyLayoutIsThatOfOneRank) {
  const std::vector<Recorded> others = {{"four", 2, 2},
                                        {"three", 3, 1, "zb_h1"},
                                        {"visits", 2, 1, "interleaved_1f1b"},
                                        {"replicas", 1, 2, "simple"},
                                        {"sharded", 2, 2, "1f1b", 4, /*degree=*/2}};
  for (const Recorded& other : others) {
    other.run();
    const Outcome outcome = diff("one", other.name);
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    EXPECT_EQ(outcome.output.find("no difference in 6 steps ("), 0u) << outcome.output;
  }
}

TEST_F(HashRecording, ShowsTheFirstOperatorThatDiffers) {
  Recorded other{"fault", 2, 2};
  // Rank 3 has the second stage of the second replica.
  other.before = [](int step) {
    if (step == 1 && rank() == 3) GeluFault::plant(Pass::kForward, 0);
  };
  other.run();
  const Outcome outcome = diff("one", "fault");
  EXPECT_EQ(outcome.status, 1);
  expect_has(outcome.output,
             {"first difference: call 2 of step function \"train\", microbatch 2, row ",
              " of the program: aten::gelu", ": f32[2, 8, 32]\n  " + folder("one") + ": rank 0: ",
              "\n  " + folder("fault") + ": rank 3: "});
}

TEST_F(HashRecording, ShowsTheFirstGradientThatDiffers) {
  Recorded other{"backward", 2, 1};
  other.before = [](int step) {
    if (step == 0 && rank() == 0) {
      GeluFault::clear();
      GeluFault::plant(Pass::kBackward, 0, /*stays=*/true);
    }
  };
  other.run();
  const Outcome outcome = diff("one", "backward");
  EXPECT_EQ(outcome.status, 1);
  expect_has(outcome.output, {"call 1 of step function \"train\", microbatch 0, row ",
                              " of the program: gradient of \"up", ": f32[32"});
}

TEST_F(HashRecording, ShowsWhereProgramsPart) {
  Recorded other{"deeper"};
  other.layers = 5;
  other.run();
  const Outcome outcome = diff("one", "deeper");
  EXPECT_EQ(outcome.status, 1);
  expect_has(outcome.output, {"call 1 of step function \"train\" ran other operators. The first "
                              "that differs is operator ",
                              folder("one") + ": ", folder("deeper") + ": "});
}

TEST_F(HashRecording, SaysWhatCannotBeCompared) {
  EXPECT_EQ(diff("one", "none").status, 2);
  expect_has(diff("one", "none").output, {"rank_0.hashes\" cannot be read. Give the folder that"});
}

TEST_F(HashRecording, SaysWhatCannotBeWritten) {
  expect_has(error_of<Error>([&] {
               run_as_threads(1, Config().record_hashes("/dev/null/hashes"), [] {
                 torch::nn::Linear net(2, 2);
                 DistributedModel<torch::nn::Linear> model(net);
                 step([&](torch::Tensor x) { return model(x).sum(); })(torch::ones({2, 2}));
               });
             }),
             {"the hashes of this rank cannot be written to \"/dev/null/hashes/rank_0.hashes\""});
}

}  // namespace
}  // namespace smp::testing
