// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/runtime.h"
#include "smp/smp.h"
#include "tests/smp/oracle.h"

// How a DistributedModel's options change the reduction of gradients over replicas.
namespace smp {
namespace {

using namespace testing;

/// Gradients of the first replica by name, after each of the steps; the first `frozen` parameters
/// have none.
std::vector<Named> train(const ModelOptions& options, int steps,
                         const std::string& pipeline = "interleaved", int frozen = 0) {
  std::vector<Named> result(steps);
  std::vector<Mlp> nets;
  for (int i = 0; i < 4; ++i) {
    torch::manual_seed(3);
    nets.emplace_back(Mlp());
    auto parameters = nets.back()->parameters();
    for (int p = 0; p < frozen; ++p) parameters[p].set_requires_grad(false);
  }
  torch::manual_seed(4);
  const auto data = torch::randn({steps, 2, 8, MlpImpl::kWidth});
  std::mutex mutex;
  torch::set_num_threads(1);
  const auto config =
      Config().partitions(2).microbatches(4).ddp(true).pipeline(pipeline).seed(7).bucket_cap_mb(
          1e-4);
  run_as_threads(4, config, [&] {
    Mlp net = nets[rank()];
    DistributedModel<Mlp> model(net, options);
    auto step = smp::step([&](torch::Tensor x) {
      auto loss = model(x).square().mean();
      model->backward(loss);
      return loss;
    });
    for (int i = 0; i < steps; ++i) {
      step(data[i][rdp_rank()].clone());
      const std::lock_guard lock(mutex);
      for (const auto& item : model->local_named_parameters()) {
        if (dp_rank() > 0 || !item.value().grad().defined()) continue;
        result[i][item.key()] = item.value().grad().clone();
      }
    }
  });
  return result;
}

void expect_equal_sums(const Named& got, const Named& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    EXPECT_TRUE(torch::equal(got.at(name), tensor)) << name;
  }
}

TEST(BucketOptions, OverlapChangesNoBit) {
  for (const std::string pipeline : {"interleaved", "interleaved_1f1b", "zbv"}) {
    const auto overlapped = train(ModelOptions(), 2, pipeline);
    const auto after = train(ModelOptions().overlapping_allreduce(false), 2, pipeline);
    const auto views = train(ModelOptions().gradient_as_bucket_view(true), 2, pipeline);
    EXPECT_EQ(after[1].size(), 12u);
    for (int i = 0; i < 2; ++i) {
      expect_equal_sums(overlapped[i], after[i]);
      expect_equal_sums(views[i], after[i]);
    }
  }
}

/// Its first stage has no backward, and none to be reduced after.
TEST(BucketOptions, ARankWithAFrozenStageReducesWhatTheOthersMake) {
  const auto overlapped = train(ModelOptions(), 1, "zbv", /*frozen=*/6);
  EXPECT_EQ(overlapped[0].size(), 6u);
  const auto after = train(ModelOptions().overlapping_allreduce(false), 1, "zbv", /*frozen=*/6);
  expect_equal_sums(after[0], overlapped[0]);
  expect_equal_sums(train(ModelOptions(), 1, "interleaved", /*frozen=*/6)[0], overlapped[0]);
}

/// Gradients of two steps, of which the first left nothing in `.grad`.
TEST(BucketOptions, PassesAddUp) {
  const auto each = train(ModelOptions(), 2);
  const auto together = train(ModelOptions().backward_passes_per_step(2), 2);
  EXPECT_TRUE(together[0].empty());
  ASSERT_EQ(together[1].size(), 12u);
  // `.grad` of the second step alone held both means already, added in another order.
  for (const auto& [name, tensor] : each[1]) {
    EXPECT_TRUE(torch::allclose(together[1].at(name), tensor)) << name;
  }
}

TEST(BucketOptions, PassesThatAddUpRunTheSameOperators) {
  const auto text = error_of<UsageError>([] {
    run_as_threads(1, Config(), [] {
      Mlp net;
      DistributedModel<Mlp> model(net, ModelOptions().backward_passes_per_step(2));
      auto step = smp::step([&](torch::Tensor x) {
        auto loss = model(x).square().mean();
        model->backward(loss);
        return loss;
      });
      step(torch::ones({2, MlpImpl::kWidth}));
      step(torch::ones({4, MlpImpl::kWidth}));
    });
  });
  EXPECT_NE(text.find("the steps whose gradients add up must run the same operators"),
            std::string::npos)
      << text;
}

/// Nor does a loaded one mix with the sums so far.
TEST(BucketOptions, PassesThatAddUpAreInNoCheckpoint) {
  const std::string path = ::testing::TempDir() + "/smp_between_passes";
  run_as_threads(1, Config(), [&] {
    Mlp net;
    DistributedModel<Mlp> model(net, ModelOptions().backward_passes_per_step(2));
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    auto step = smp::step([&](torch::Tensor x) { model->backward(model(x).square().mean()); });
    const auto expect_refused = [](const std::string& call, const std::function<void()>& run) {
      const auto text = error_of<UsageError>(run);
      EXPECT_NE(text.find(call + " was called while sums of gradients wait for later steps"),
                std::string::npos)
          << text;
    };
    step(torch::ones({2, MlpImpl::kWidth}));
    expect_refused("smp::save", [&] { smp::save(path, model, optimizer); });
    smp::save(path, model);
    step(torch::ones({2, MlpImpl::kWidth}));
    smp::save(path, model, optimizer);
    step(torch::ones({2, MlpImpl::kWidth}));
    expect_refused("smp::load", [&] { smp::load(path, model, optimizer); });
    smp::load(path, model);
  });
  std::filesystem::remove_all(path);
}

/// Replicas that count their own batches, and then take the first one's count.
TEST(BucketOptions, BuffersFollowTheFirstReplica) {
  for (const bool broadcast : {false, true}) {
    run_as_threads(2, Config().ddp(true).seed(7), [&] {
      torch::nn::Sequential net(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4));
      DistributedModel<torch::nn::Sequential> model(net,
                                                    ModelOptions().broadcast_buffers(broadcast));
      auto step = smp::step([&](torch::Tensor x) {
        auto loss = model(x).square().mean();
        model->backward(loss);
        return loss;
      });
      const auto mean = [&] {
        const auto all = torch::empty({2, 4});
        runtime::Runtime::get().world()->all_gather(all, net->buffers()[0].detach().contiguous());
        return all;
      };
      step(torch::full({2, 6}, 1. + rank()));
      EXPECT_FALSE(torch::equal(mean()[0], mean()[1]));
      step(torch::full({2, 6}, 1.));  // the same batch for both
      EXPECT_EQ(torch::allclose(mean()[0], mean()[1]), broadcast);
    });
  }
}

}  // namespace
}  // namespace smp
