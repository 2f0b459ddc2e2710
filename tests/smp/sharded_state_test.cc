// SPDX-License-Identifier: Apache-2.0
#include "tests/smp/sharded_state.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "smp/optim/adadelta.h"

// `shard_optimizer_state`: the same bits as without, and a part of the state on each replica.
namespace smp {
namespace {

using namespace testing;
namespace to = torch::optim;

const auto kShardedSgd =
    recipe<to::SGD>(to::SGDOptions(0.1).momentum(0.9).weight_decay(0.01).nesterov(true), true);
const auto kShardedAdam =
    recipe<to::Adam>(to::AdamOptions(0.01).amsgrad(true).weight_decay(0.01), true);
const auto kShardedAdamW = recipe<to::AdamW>(to::AdamWOptions(0.01).weight_decay(0.1), true);
// libtorch's Adagrad makes its state in the constructor, and has none for later groups.
const auto kShardedAdagrad = recipe<to::Adagrad>(
    to::AdagradOptions(0.05).lr_decay(0.01).weight_decay(0.01).initial_accumulator_value(0.1));
const auto kRmsProp = recipe<to::RMSprop>(
    to::RMSpropOptions(0.01).momentum(0.9).centered(true).weight_decay(0.01), true);
const auto kAdadelta = recipe<optim::Adadelta>(optim::AdadeltaOptions(1).weight_decay(0.01), true);

/// All numbers of replicas, and stages too.
const std::vector<Training> kRuns{{1, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 2}};

TEST(ShardedState, Sgd) { expect_as_plain(kShardedSgd, kRuns); }
TEST(ShardedState, Adam) { expect_as_plain(kShardedAdam, kRuns); }
TEST(ShardedState, AdamW) { expect_as_plain(kShardedAdamW, kRuns); }
TEST(ShardedState, Adagrad) { expect_as_plain(kShardedAdagrad, kRuns); }
TEST(ShardedState, RmsProp) { expect_as_plain(kRmsProp, kRuns); }
TEST(ShardedState, Adadelta) { expect_as_plain(kAdadelta, kRuns); }

/// Any number of replicas has the same bits if the shards are the same.
TEST(ShardedState, GradientShards) {
  std::vector<Training> runs{{1, 1}, {1, 2}, {1, 3}, {2, 3}};
  for (Training& run : runs) {
    run.microbatches = 12 / run.replicas;
    run.gradient_shards = 6;
  }
  expect_as_plain(kShardedAdam, runs);
}

/// Every option of the reduction, against the run that is not sharded.
TEST(ShardedState, ModelOptions) {
  for (const auto& options :
       {ModelOptions().gradient_as_bucket_view(true), ModelOptions().overlapping_allreduce(false),
        ModelOptions().average_grads_across_microbatches(false),
        ModelOptions().backward_passes_per_step(2), ModelOptions().bucket_cap_mb(1)}) {
    Training run{2, 2};
    const auto weights = [&] {
      auto tested = sharded_case(run, kShardedAdam);
      tested.model_options = options;
      return tested.run_on_ranks().weights;
    };
    const auto sharded = weights();
    run.sharded = false;
    expect_equal(sharded, weights(), "value");
  }
}

/// Elements of the two averages that Adam keeps, on this rank.
int64_t state_elements(const to::Adam& optimizer) {
  int64_t count = 0;
  for (const auto& [key, state] : optimizer.state()) {
    const auto& adam = static_cast<const to::AdamParamState&>(*state);
    count += adam.exp_avg().numel() + adam.exp_avg_sq().numel() + adam.max_exp_avg_sq().numel();
  }
  return count;
}

/// State of each replica, after a step of Adam on a model of some size.
std::vector<int64_t> state_of_replicas(int replicas, bool sharded) {
  std::vector<int64_t> elements(replicas);
  torch::set_num_threads(1);
  run_as_threads(replicas, stages(1).ddp(true).shard_optimizer_state(sharded), [&] {
    torch::nn::Sequential net(torch::nn::Linear(301, 203), torch::nn::Linear(203, 107));
    DistributedModel<torch::nn::Sequential> model(net);
    DistributedOptimizer<to::Adam> optimizer(model->parameters(), to::AdamOptions().amsgrad(true));
    auto train = step([&](torch::Tensor x) {
      auto loss = model(x).square().mean();
      model->backward(loss);
      return loss;
    });
    train(torch::ones({2, 301}));
    optimizer.step();
    elements[dp_rank()] = state_elements(optimizer);
  });
  return elements;
}

TEST(ShardedState, IsAPartOnEachReplica) {
  constexpr int64_t kAll = 3 * (301 * 203 + 203 + 203 * 107 + 107);
  for (const int replicas : {2, 3, 4}) {
    int64_t sum = 0;
    for (const int64_t count : state_of_replicas(replicas, true)) {
      sum += count;
      // Four gradients that start, and parts that end, at multiples of 64 elements.
      EXPECT_NEAR(count, kAll / replicas, 3 * 64 * (4 + replicas));
      RecordProperty(c10::str("of_", replicas, "_replicas"), c10::str(count, " of ", kAll));
    }
    EXPECT_EQ(sum, kAll);
  }
  EXPECT_EQ(state_of_replicas(2, false), std::vector<int64_t>({kAll, kAll}));
}

/// Cut from a whole gradient, pieces of all replicas one after the other are that gradient.
TEST(ShardedState, VirtualParametersHaveTheGradients) {
  Training run{2, 2};
  run.steps = 1;
  Named whole;
  run.sharded = false;
  auto replicas = sharded_case(run, kShardedSgd);
  replicas.after_step = [&](auto& rank, int) {
    for (const auto& item : rank.model->virtual_named_parameters()) {
      EXPECT_TRUE(item.value().is_same(rank.model->named_parameters()[item.key()]));
      if (item.value().grad().defined()) whole[item.key()] = item.value().grad().clone();
    }
  };
  replicas.run_on_ranks();
  std::map<std::string, std::map<int, torch::Tensor>> pieces;
  run.sharded = true;
  auto sharded = sharded_case(run, kShardedSgd);
  sharded.after_step = [&](auto& rank, int) {
    const auto parameters = rank.model->virtual_named_parameters();
    EXPECT_EQ(parameters.size(), rank.model->local_virtual_parameters().size());
    for (const auto& item : parameters) {
      EXPECT_EQ(item.value().dim(), 1);
      EXPECT_TRUE(item.value().is_alias_of(rank.model->named_parameters()[item.key()]));
      if (item.value().grad().defined())
        pieces[item.key()][dp_rank()] = item.value().grad().clone();
    }
  };
  sharded.run_on_ranks();
  ASSERT_EQ(pieces.size(), whole.size());
  EXPECT_EQ(whole.count("unused"), 0u);
  for (const auto& [name, gradient] : whole) {
    Tensors parts;
    for (const auto& [replica, piece] : pieces[name]) parts.push_back(piece);
    const auto in_memory = name == "turned" ? gradient.t() : gradient;
    EXPECT_TRUE(torch::equal(torch::cat(parts), in_memory.flatten())) << name;
  }
}

}  // namespace
}  // namespace smp
