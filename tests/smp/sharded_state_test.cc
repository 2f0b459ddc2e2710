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

const auto kSgd =
    recipe<to::SGD>(to::SGDOptions(0.1).momentum(0.9).weight_decay(0.01).nesterov(true), true);
const auto kAdam = recipe<to::Adam>(to::AdamOptions(0.01).amsgrad(true).weight_decay(0.01), true);
const auto kAdamW = recipe<to::AdamW>(to::AdamWOptions(0.01).weight_decay(0.1), true);
// libtorch's Adagrad makes its state in the constructor, and has none for later groups.
const auto kAdagrad = recipe<to::Adagrad>(
    to::AdagradOptions(0.05).lr_decay(0.01).weight_decay(0.01).initial_accumulator_value(0.1));
const auto kRmsProp = recipe<to::RMSprop>(
    to::RMSpropOptions(0.01).momentum(0.9).centered(true).weight_decay(0.01), true);
const auto kAdadelta = recipe<optim::Adadelta>(optim::AdadeltaOptions(1).weight_decay(0.01), true);

/// All numbers of replicas, and stages too, against plain libtorch.
template <class Recipe>
void expect_as_plain(const Recipe& recipe) {
  for (const Training& run :
       {Training{1, 1}, Training{1, 2}, Training{1, 3}, Training{1, 4}, Training{2, 2}}) {
    SCOPED_TRACE(c10::str(run));
    expect_equal(train_ranks(run, recipe), train_plain(recipe, run.replicas, 2, run.last_step),
                 "value");
  }
}

TEST(ShardedState, Sgd) { expect_as_plain(kSgd); }
TEST(ShardedState, Adam) { expect_as_plain(kAdam); }
TEST(ShardedState, AdamW) { expect_as_plain(kAdamW); }
TEST(ShardedState, Adagrad) { expect_as_plain(kAdagrad); }
TEST(ShardedState, RmsProp) { expect_as_plain(kRmsProp); }
TEST(ShardedState, Adadelta) { expect_as_plain(kAdadelta); }

/// Any number of replicas has the same bits if the shards are the same.
TEST(ShardedState, GradientShards) {
  const auto expected = train_plain(kAdam, 6, 2, 4);
  for (Training run : {Training{1, 1}, Training{1, 2}, Training{1, 3}, Training{2, 3}}) {
    SCOPED_TRACE(c10::str(run));
    run.microbatches = 12 / run.replicas;
    expect_equal(train_ranks(run.with_shards(6), kAdam), expected, "value");
  }
}

/// Every option of the reduction, against the run that is not sharded.
TEST(ShardedState, ModelOptions) {
  for (const auto& options :
       {ModelOptions().gradient_as_bucket_view(true), ModelOptions().overlapping_allreduce(false),
        ModelOptions().average_grads_across_microbatches(false),
        ModelOptions().backward_passes_per_step(2), ModelOptions().bucket_cap_mb(1)}) {
    Training run{2, 2};
    const auto sharded = train_ranks(run, kAdam, options);
    run.sharded = false;
    expect_equal(sharded, train_ranks(run, kAdam, options), "value");
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
  run.last_step = 1;
  Named whole;
  run.sharded = false;
  train_ranks(run, kSgd, [&](auto& model, auto&, int) {
    for (const auto& item : model->virtual_named_parameters()) {
      EXPECT_TRUE(item.value().is_same(model->named_parameters()[item.key()]));
      if (item.value().grad().defined()) whole[item.key()] = item.value().grad().clone();
    }
  });
  std::map<std::string, std::map<int, torch::Tensor>> pieces;
  run.sharded = true;
  train_ranks(run, kSgd, [&](auto& model, auto&, int) {
    const auto parameters = model->virtual_named_parameters();
    EXPECT_EQ(parameters.size(), model->local_virtual_parameters().size());
    for (const auto& item : parameters) {
      EXPECT_EQ(item.value().dim(), 1);
      EXPECT_TRUE(item.value().is_alias_of(model->named_parameters()[item.key()]));
      if (item.value().grad().defined())
        pieces[item.key()][dp_rank()] = item.value().grad().clone();
    }
  });
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
