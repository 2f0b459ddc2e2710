// SPDX-License-Identifier: Apache-2.0
// The configuration's `replay_check`: planted faults are found and named, and without one nothing
// is, and no bit changes.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "graph/allocations.h"
#include "smp/smp.h"
#include "tests/error_of.h"
#include "tests/smp/faulty_gelu.h"
#include "tests/smp/models.h"
#include "tests/smp/parity.h"

namespace smp::testing {
namespace {

namespace to = torch::optim;
using parity::Layout;
using Pass = GeluFault::Pass;

constexpr int kReplayMicrobatches = 4;

Config config_of(int stages, int replicas) {
  return Config()
      .partitions(stages)
      .microbatches(kReplayMicrobatches)
      .pipeline("1f1b")
      .ddp(replicas > 1)
      .placement_strategy("cluster")
      .memory_weight(1)
      .seed(7)
      .timeout_seconds(60)
      .replay_check(1);
}

/// Trains a small GPT, without dropout, for at most `steps`; `before` is called before each, from 1
/// on, with the model. Returns the error of each rank, by world rank.
std::map<int, std::string> train(
    int ranks, const Config& config, int steps,
    const std::function<void(int step, DistributedModel<TinyGpt>& model)>& before) {
  torch::set_num_threads(1);
  torch::manual_seed(5);
  std::vector<TinyGpt> nets;
  for (int i = 0; i < ranks; ++i) nets.push_back(TinyGpt(/*tied=*/true, /*layers=*/4, 0.0));
  const auto batch = TinyGptImpl::batch(2 * kReplayMicrobatches);
  std::map<int, std::string> errors;
  std::mutex mutex;
  run_as_threads(ranks, config, [&] {
    GeluFault::clear();
    DistributedModel<TinyGpt> model(nets[rank()]);
    DistributedOptimizer<to::SGD> optimizer(model->parameters(), to::SGDOptions(0.1));
    auto step = smp::step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = TinyGptImpl::criterion(model(x), y);
      model->backward(loss);
      return loss;
    });
    for (int i = 1; i <= steps; ++i) {
      before(i, model);
      optimizer.zero_grad();
      try {
        step(batch[0], batch[1]);
      } catch (const CorruptionError& error) {
        for (const auto& parameter : model->local_parameters()) {
          EXPECT_FALSE(parameter.grad().defined()) << "handed out before the error";
        }
        const std::lock_guard<std::mutex> lock(mutex);
        errors[rank()] = error.what();
        return;
      }
      optimizer.step();
    }
  });
  return errors;
}

/// All ranks threw, and say the same behind their prefix. Returns that.
std::string same_error(const std::map<int, std::string>& errors, int ranks) {
  EXPECT_EQ(errors.size(), static_cast<size_t>(ranks));
  std::string text;
  for (const auto& [rank, error] : errors) {
    const std::string own = error.substr(error.find("] ") + 2);
    if (text.empty()) text = own;
    EXPECT_EQ(own, text) << "on rank " << rank;
  }
  return text;
}

/// A check in every third step, so that step 2 is one without.
constexpr int kPeriod = 3;

/// Trains until step `step`, in which a fault is planted on rank `victim`: in its `first`-th call
/// of a pass, given how many of them a microbatch makes there.
std::map<int, std::string> train_with_fault(const Layout& layout, int step, int victim, Pass pass,
                                            const std::function<int(int per_microbatch)>& first) {
  const int ranks = layout.stages * layout.replicas;
  const Config config = config_of(layout.stages, layout.replicas).replay_check(kPeriod);
  thread_local int per_microbatch = 0;
  return train(ranks, config, step, [&](int now, auto&) {
    if (now == 2) GeluFault::clear();
    if (now == 3) per_microbatch = GeluFault::calls(pass) / kReplayMicrobatches;
    if (now != step || rank() != victim) return;
    EXPECT_GT(per_microbatch, 0);
    GeluFault::plant(pass, first(per_microbatch));
  });
}

const Layout kPipeline{2, 1, kReplayMicrobatches, "1f1b"};

/// The second check is of microbatch 1 of stage 0, the third of microbatch 1 of stage 1.
TEST(ReplayCheck, NamesAResultThatHasAnotherBit) {
  for (const int stage : {0, 1}) {
    const int step = (2 + stage) * kPeriod;
    const auto errors = train_with_fault(kPipeline, step, stage, Pass::kForward,
                                         [](int per_microbatch) { return per_microbatch; });
    const std::string own = std::to_string(stage), other = std::to_string(1 - stage);
    expect_has(same_error(errors, 2),
               {"replay_check, in training step " + std::to_string(step) +
                    ", step function \"step 0\": result 0 of operator ",
                "(aten::gelu",
                "f32[2, 8, 32]) has other bits where microbatch 1 of stage " + own +
                    " ran, world rank " + own + " (hash ",
                "), than where it ran again on the same numbers, world rank " + other + " (hash ",
                "; all before it on the stage is equal",
                "A third run, on world rank " + other +
                    ", gave what the second gave: the first is the one to doubt",
                "No gradient of this step has been handed out"});
  }
}

TEST(ReplayCheck, NamesAGradientThatHasAnotherBit) {
  const auto errors = train_with_fault(kPipeline, 2 * kPeriod, 0, Pass::kBackward,
                                       [](int per_microbatch) { return per_microbatch; });
  expect_has(same_error(errors, 2), {"the gradient of parameter \"up",
                                     "has other bits where microbatch 1 of stage 0 ran"});
}

/// The rank that runs it again is the one that computes wrong.
TEST(ReplayCheck, DoubtsTheRankThatRunsAgain) {
  const auto errors =
      train_with_fault(kPipeline, 2 * kPeriod, 1, Pass::kForward,
                       [](int per_microbatch) { return kReplayMicrobatches * per_microbatch; });
  expect_has(same_error(errors, 2),
             {"(aten::gelu", "gave what the first gave: the second is the one to doubt"});
}

/// Its second check is of microbatch 2 of its one stage.
TEST(ReplayCheck, OfOneRankRunsOnTheSame) {
  const auto errors = train_with_fault({1, 1, kReplayMicrobatches, "1f1b"}, 2 * kPeriod, 0,
                                       Pass::kForward, [](int each) { return 2 * each; });
  expect_has(same_error(errors, 1),
             {"(aten::gelu", "microbatch 2 of stage 0 ran, world rank 0",
              "ran again on the same numbers, world rank 0", "the first is the one to doubt"});
}

/// Replicas without a pipeline look after each other.
TEST(ReplayCheck, OfReplicasRunsOnTheNext) {
  const auto errors = train_with_fault({1, 3, kReplayMicrobatches, "1f1b"}, 2 * kPeriod, 2,
                                       Pass::kForward, [](int each) { return 2 * each; });
  expect_has(same_error(errors, 3), {"(aten::gelu", "microbatch 10 of stage 0 ran, world rank 2",
                                     "ran again on the same numbers, world rank 0"});
}

TEST(ReplayCheck, ComparesWeightsOfReplicas) {
  const auto errors = train(4, config_of(2, 2), 4, [](int step, auto& model) {
    if (step != 3 || rank() != 2) return;
    const auto named = model->local_named_parameters();
    torch::NoGradGuard no_grad;
    static_cast<uint8_t*>(named.front().value().mutable_data_ptr())[0] ^= 1;
  });
  expect_has(same_error(errors, 4),
             {"in training step 3", ": parameter \"", "has other bits on world rank 2 (hash ",
              "than on its replica, world rank 0 (hash "});
}

/// Parameters that are not divided.
TEST(ReplayCheck, ComparesWholeWeightsBesideShards) {
  const auto sharded = config_of(2, 2).sharded_data_parallel_degree(2);
  const auto errors =
      train(4, Config(sharded).sdp_param_persistence_threshold(100), 4, [](int step, auto& model) {
        if (step != 3 || rank() != 2) return;
        const torch::NoGradGuard no_grad;
        model->local_named_parameters()["norm0.bias"].add_(1);
      });
  expect_has(same_error(errors, 4),
             {"in training step 3",
              ": parameter \"norm0.bias\", f32[16], has other bits on world rank 2 (hash ",
              "than on its replica, world rank 0 (hash "});
}

/// Shards are compared within replication groups: ranks 0 and 2, and 1 and 3.
TEST(ReplayCheck, ComparesShardsOfReplicationGroups) {
  const auto sharded = config_of(1, 4).sharded_data_parallel_degree(2);
  std::string name;
  const auto errors =
      train(4, Config(sharded).sdp_param_persistence_threshold(1), 4, [&](int step, auto& model) {
        if (step != 3 || rank() != 3) return;
        const auto named = model->virtual_named_parameters();
        name = named.front().key();
        const torch::NoGradGuard no_grad;
        named.front().value().add_(1);
      });
  expect_has(same_error(errors, 4), {"in training step 3", ": parameter \"" + name + "[",
                                     "], has other bits on world rank 3 (hash ",
                                     "than on its replica, world rank 1 (hash "});
}

/// Plays ranks with the check in each step.
void run_checked(int ranks, const Config& config, const std::function<void()>& program) {
  run_as_threads(ranks, Config(config).replay_check(1), program);
}

template <class Net, class Optimizer, class Options>
void check(const std::vector<Layout>& layouts, const std::function<Net()>& make,
           const Options& options) {
  torch::set_num_threads(1);
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(::testing::Message() << layout);
    parity::check<Net, Optimizer>(layout.with_steps(6), make, options, run_checked);
  }
}

TEST(ReplayCheck, FindsNothingInAGptWithDropoutAndATiedWeight) {
  check<TinyGpt, to::AdamW>({{2, 1, 3, "interleaved"},
                             {2, 2, 2, "1f1b"},
                             {3, 1, 4, "zb_h1"},
                             {2, 1, 4, "interleaved_1f1b"},
                             {2, 1, 4, "dualpipe_v"},
                             {1, 2, 2, "simple"},
                             {1, 1, 3, "1f1b"}},
                            std::function<TinyGpt()>([] { return TinyGpt(/*tied=*/true); }),
                            to::AdamWOptions(0.01));
}

TEST(ReplayCheck, FindsNothingInANetWithBuffers) {
  check<TinyConvNet, to::SGD>(
      {{2, 1, 4, "1f1b"}, {2, 2, 2, "zb_h1"}, {3, 1, 2, "interleaved"}, {1, 2, 3, "simple"}},
      std::function<TinyConvNet()>([] { return TinyConvNet(); }), to::SGDOptions(0.1));
}

/// Losses and weights of a few steps.
std::vector<torch::Tensor> results_of(int ranks, const Config& config, bool checkpoints) {
  torch::set_num_threads(1);
  torch::manual_seed(5);
  std::vector<TinyGpt> nets;
  for (int i = 0; i < ranks; ++i) nets.push_back(TinyGpt(/*tied=*/true));
  const auto batch = TinyGptImpl::batch(2 * kReplayMicrobatches);
  std::vector<torch::Tensor> results;
  std::mutex mutex;
  run_as_threads(ranks, config, [&] {
    DistributedModel<TinyGpt> model(nets[rank()]);
    if (checkpoints) {
      for (auto& layer : nets[rank()]->up) set_activation_checkpointing(layer);
    }
    DistributedOptimizer<to::AdamW> optimizer(model->parameters(), to::AdamWOptions(0.01));
    auto step = smp::step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = TinyGptImpl::criterion(model(x), y);
      model->backward(loss);
      return loss;
    });
    std::vector<torch::Tensor> own;
    for (int i = 0; i < 5; ++i) {
      optimizer.zero_grad();
      own.push_back(step(batch[0], batch[1]).reduce_mean());
      optimizer.step();
    }
    for (const auto& item : model->state_dict()) own.push_back(item.value().clone());
    const std::lock_guard<std::mutex> lock(mutex);
    if (rank() == 0) results = own;
  });
  return results;
}

/// Also where parameters are of half precision, run again in the backward pass, or are divided.
TEST(ReplayCheck, ChangesNoBits) {
  struct Case {
    int ranks;
    Config config;
    bool checkpoints;
  };
  const std::vector<Case> cases = {
      {2, config_of(2, 1).bf16(true), false},
      {2, config_of(2, 1), true},
      {2, config_of(2, 1).gradient_accumulation_fusion(true), false},
      {2, config_of(1, 2).shard_optimizer_state(true), false},
      {4, config_of(2, 2).sharded_data_parallel_degree(2).sdp_param_persistence_threshold(0),
       false},
      {2, config_of(1, 2).sharded_data_parallel_degree(2).sdp_param_persistence_threshold(0),
       false},
      {4, config_of(2, 2).tensor_parallel_degree(2).ddp(true), false},
      {2, config_of(2, 1).record_hashes(::testing::TempDir() + "replay_check_hashes"), false}};
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const Case& with = cases[i];
    const auto checked = results_of(with.ranks, with.config, with.checkpoints);
    const auto plain =
        results_of(with.ranks, Config(with.config).replay_check(0), with.checkpoints);
    ASSERT_EQ(checked.size(), plain.size());
    ASSERT_FALSE(plain.empty());
    for (size_t j = 0; j < plain.size(); ++j) EXPECT_TRUE(torch::equal(checked[j], plain[j])) << j;
  }
}

/// The most that a rank allocates in a step of layers that are much larger than their inputs.
int64_t peak_of_step(const Config& config) {
  constexpr int kLayers = 6, kWidth = 64;
  int64_t peak = 0;
  run_as_threads(1, config, [&] {
    torch::nn::Sequential net;
    for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
    DistributedModel<torch::nn::Sequential> model(net);
    auto step = smp::step([&](torch::Tensor x) {
      auto loss = model(x).square().mean();
      model->backward(loss);
      return loss;
    });
    const auto x = torch::ones({kReplayMicrobatches, kWidth});
    step(x);  // captures
    step(x);
    const graph::Allocations allocations;
    step(x);
    peak = allocations.peak();
  });
  return peak;
}

/// Beside the sums of gradients there is room for a gradient, and not for those of all layers.
TEST(ReplayCheck, DropsGradientsAsItMakesThem) {
  constexpr int64_t kWeight = 64 * 64 * sizeof(float);
  torch::set_num_threads(1);
  const int64_t plain = peak_of_step(config_of(1, 1).replay_check(0));
  EXPECT_LT(peak_of_step(config_of(1, 1)), plain + 2 * kWeight);
}

}  // namespace
}  // namespace smp::testing
