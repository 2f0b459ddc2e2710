// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <set>

#include "smp/ddp.h"
#include "smp/smp.h"
#include "tests/smp/oracle.h"

// Communication hooks of a DistributedModel, which reduce its buckets instead of the sum.
namespace smp {
namespace {

using namespace testing;

constexpr int kReplicas = 2, kMicrobatches = 3, kSteps = 3;

torch::Tensor make_data() {
  torch::manual_seed(4);
  return torch::randn({kSteps, kReplicas, 6, MlpImpl::kWidth});
}

Config two_stages() {
  return Config()
      .partitions(2)
      .microbatches(kMicrobatches)
      .ddp(true)
      .seed(7)
      .bucket_cap_mb(1e-4)
      .timeout_seconds(60);
}

/// Gradients by name after each step, the same on all replicas: two stages of each.
std::vector<Named> train(const CommHook& hook, const ModelOptions& options = {}) {
  torch::set_num_threads(1);
  std::vector<Mlp> nets;
  for (int rank = 0; rank < 2 * kReplicas; ++rank) nets.push_back(make_mlp());
  const auto data = make_data();
  std::vector<std::vector<Named>> of_replica(kReplicas, std::vector<Named>(kSteps));
  std::mutex mutex;
  run_as_threads(2 * kReplicas, two_stages(), [&] {
    DistributedModel<Mlp> model(nets[rank()], options);
    if (hook) model->register_comm_hook(hook);
    auto step = smp::step([&](torch::Tensor x) { model->backward(model(x).square().mean()); });
    for (int i = 0; i < kSteps; ++i) {
      model->zero_grad();
      step(data[i][rdp_rank()].clone());
      const std::lock_guard lock(mutex);
      for (const auto& item : model->local_named_parameters()) {
        if (!item.value().grad().defined()) continue;
        of_replica[rdp_rank()][i][item.key()] = item.value().grad().clone();
      }
    }
  });
  for (int i = 0; i < kSteps; ++i) {
    expect_equal(of_replica[1][i], of_replica[0][i], "gradient of the second replica");
  }
  return of_replica[0];
}

/// The sums of each replica over its microbatches, of plain libtorch.
std::vector<Named> plain_sums(int step) {
  std::vector<Named> result(kReplicas);
  Mlp net = make_mlp();
  const auto data = make_data();
  for (int replica = 0; replica < kReplicas; ++replica) {
    for (int m = 0; m < kMicrobatches; ++m) {
      net->zero_grad();
      net->forward(part(data[step][replica], kMicrobatches, m)).square().mean().backward();
      for (const auto& item : net->named_parameters()) {
        torch::Tensor& sum = result[replica][item.key()];
        sum = sum.defined() ? sum + item.value().grad() : item.value().grad().clone();
      }
    }
  }
  return result;
}

TEST(CommHook, TheMeanHasTheBitsOfNoHook) {
  for (const auto& options :
       {ModelOptions(), ModelOptions().gradient_as_bucket_view(true),
        ModelOptions().overlapping_allreduce(false), ModelOptions().backward_passes_per_step(3),
        ModelOptions().average_grads_across_microbatches(false)}) {
    const auto expected = train(nullptr, options);
    const auto got = train(all_reduce_hook, options);
    EXPECT_EQ(expected.back().size(), 12u);
    for (int i = 0; i < kSteps; ++i) expect_equal(got[i], expected[i], "gradient");
  }
}

TEST(CommHook, CompressesToHalfPrecision) {
  for (const auto type : {torch::kHalf, torch::kBFloat16}) {
    const auto got = train(type == torch::kHalf ? fp16_compress_hook : bf16_compress_hook);
    for (int step = 0; step < kSteps; ++step) {
      const auto sums = plain_sums(step);
      Named expected;
      for (const auto& [name, first] : sums[0]) {
        torch::Tensor total;
        for (const Named& of_replica : sums) {
          const auto small = of_replica.at(name).to(type) / (kReplicas * kMicrobatches);
          total = total.defined() ? total + small.to(torch::kFloat) : small.to(torch::kFloat);
        }
        expected[name] = total.to(type).to(torch::kFloat);
      }
      expect_equal(got[step], expected, "gradient");
    }
  }
}

/// Each rank's hook gets the buckets of its stages, and its results there are the gradients.
TEST(CommHook, IsGivenTheBucketsOfItsRank) {
  std::mutex mutex;
  std::multiset<std::string> seen;
  const auto got = train([&](const GradBucket& bucket) {
    EXPECT_EQ(bucket.divisor, kReplicas * kMicrobatches);
    EXPECT_EQ(bucket.group.size(), kReplicas);
    EXPECT_EQ(bucket.group.ranks(), group(CommGroup::kRdp).ranks());
    EXPECT_EQ(bucket.is_last(), bucket.index + 1 == bucket.count);
    EXPECT_EQ(bucket.gradients.size(), bucket.parameters.size());
    for (size_t i = 0; i < bucket.gradients.size(); ++i) {
      EXPECT_EQ(bucket.gradients[i].sizes(), bucket.parameters[i].sizes());
      EXPECT_EQ(get_partition(bucket.parameters[i]).partition, pp_rank());
      const std::lock_guard lock(mutex);
      seen.insert(bucket.names[i]);
    }
    return then(bucket.group.async().all_reduce(bucket.buffer, ReduceOp::kMax),
                [buffer = bucket.buffer] { buffer.neg_(); });
  });
  for (int step = 0; step < kSteps; ++step) {
    const auto sums = plain_sums(step);
    ASSERT_EQ(got[step].size(), sums[0].size());
    for (const auto& [name, first] : sums[0]) {
      EXPECT_EQ(seen.count(name), static_cast<size_t>(kReplicas * kSteps)) << name;
      expect_equal(got[step].at(name), -torch::maximum(first, sums[1].at(name)), name);
    }
  }
}

/// The hook has a state, and its own collectives when it is waited for.
TEST(CommHook, PowerSgdAsInDistributedDataParallel) {
  constexpr int kIterations = 5;
  torch::set_num_threads(1);
  torch::manual_seed(5);
  const auto weight = torch::randn({12, 16});
  const auto data = torch::randn({kIterations, kReplicas, 4, 16});
  const auto make = [&] {
    torch::nn::Linear layer(torch::nn::LinearOptions(16, 12).bias(false));
    torch::NoGradGuard no_grad;
    layer->weight.copy_(weight);
    return layer;
  };
  const auto options = PowerSGDOptions().start_iter(2);
  std::vector<std::vector<Tensors>> got(2, std::vector<Tensors>(kReplicas));
  run_as_threads(kReplicas, Config().ddp(true).timeout_seconds(60), [&] {
    const auto replicated = make();
    DistributedDataParallel<torch::nn::Linear> ddp(replicated);
    ddp.register_comm_hook(power_sgd_hook(options));
    const auto stepped = make();
    DistributedModel<torch::nn::Linear> model(stepped);
    model->register_comm_hook(power_sgd_hook(options));
    auto step = smp::step([&](torch::Tensor x) { model->backward(model(x).square().mean()); });
    for (int i = 0; i < kIterations; ++i) {
      const auto x = data[i][rank()].clone();
      ddp->zero_grad();
      ddp(x).square().mean().backward();
      got[0][rank()].push_back(ddp->weight.grad().clone());
      model->zero_grad();
      step(x);
      got[1][rank()].push_back(stepped->weight.grad().clone());
    }
  });
  for (int rank = 0; rank < kReplicas; ++rank) {
    expect_equal(got[1][rank], got[0][0], "gradient of replica " + std::to_string(rank));
  }
}

void one_step(DistributedModel<Mlp>& model) {
  auto step = smp::step([&](torch::Tensor x) { model->backward(model(x).square().mean()); });
  step(torch::ones({kMicrobatches, MlpImpl::kWidth}));
}

std::string error_with(const Config& config,
                       const std::function<void(DistributedModel<Mlp>&)>& run) {
  return error_of_run<UsageError>(2, config, [&] {
    Mlp net;
    DistributedModel<Mlp> model(net);
    run(model);
  });
}

TEST(CommHookErrors, OnceAndBeforeTheFirstStep) {
  const auto config = Config().ddp(true).timeout_seconds(60);
  const auto twice = error_with(config, [](DistributedModel<Mlp>& model) {
    model->register_comm_hook(all_reduce_hook);
    model->register_comm_hook(all_reduce_hook);
  });
  EXPECT_NE(twice.find("DistributedModel: register_comm_hook was called twice; a model has one"),
            std::string::npos)
      << twice;
  const auto late = error_with(config, [](DistributedModel<Mlp>& model) {
    one_step(model);
    model->register_comm_hook(all_reduce_hook);
  });
  EXPECT_NE(late.find("register_comm_hook was called after the first step"), std::string::npos)
      << late;
  const auto differs = error_with(config, [](DistributedModel<Mlp>& model) {
    if (rank() == 0) model->register_comm_hook(all_reduce_hook);
    one_step(model);
  });
  EXPECT_NE(differs.find("the model differs between ranks: rank 0 has communication hook"),
            std::string::npos)
      << differs;
}

TEST(CommHookErrors, WhereReplicasHaveParts) {
  const auto add_hook = [](DistributedModel<Mlp>& model) {
    model->register_comm_hook(all_reduce_hook);
  };
  const auto config = Config().ddp(true).timeout_seconds(60);
  const auto state = error_with(Config(config).shard_optimizer_state(true), add_hook);
  EXPECT_NE(state.find("a communication hook reduces whole gradients, and with "
                       "\"shard_optimizer_state\" a replica gets its part of them only"),
            std::string::npos)
      << state;
  const auto sharded = error_with(Config(config).sharded_data_parallel_degree(2), add_hook);
  EXPECT_NE(sharded.find("with \"sharded_data_parallel_degree\" above 1 a replica"),
            std::string::npos)
      << sharded;
  const auto shards = error_with(Config(config).microbatches(2).gradient_shards(4), add_hook);
  EXPECT_NE(shards.find("a communication hook is given one sum by each of the 2 replicas, and "
                        "\"gradient_shards\" is 4"),
            std::string::npos)
      << shards;
}

}  // namespace
}  // namespace smp
