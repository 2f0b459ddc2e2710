// SPDX-License-Identifier: Apache-2.0
// The code of docs/optimizers.md, compiled and run: optimizers_page_test checks that every block of
// that page is found here.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "smp/optim/fused.h"
#include "smp/optim/lamb.h"
#include "smp/optim/novograd.h"
#include "smp/smp.h"
#include "tests/docs/two_stages.h"

namespace {

using smp::testing::inputs;
using smp::testing::make_training;
using smp::testing::Net;
using smp::testing::on_two_stages;
using smp::testing::targets;

TEST(OptimizersPage, GroupsClippingAndStates) {
  on_two_stages([](Net net, Net) {
    smp::DistributedModel<Net> model(net);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(net->fc1->parameters());
    groups.emplace_back(net->fc2->parameters(), std::make_unique<torch::optim::AdamWOptions>(1e-2));
    smp::DistributedOptimizer<torch::optim::AdamW> optimizer(groups,
                                                             torch::optim::AdamWOptions(1e-3));
    torch::optim::StepLR scheduler(optimizer, /*step_size=*/10, /*gamma=*/0.5);
    smp::DistributedOptimizer<torch::optim::AdamW> other(model->parameters());
    auto train = make_training(model);
    const auto x = inputs(), y = targets();
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      train(x, y);
      const double norm = smp::clip_grad_norm_(model, /*max_norm=*/1.0);
      optimizer.step();
      EXPECT_GT(norm, 0);
      scheduler.step();
    }
    EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 1e-2);
    other.param_groups().clear();
    for (const auto& group : optimizer.param_groups()) other.add_param_group(group);
    const smp::OptimizerState state = optimizer.state_dict();
    const torch::Tensor average = state.params.at("fc1.weight").tensors.at("exp_avg");
    other.load_state_dict(state);
    EXPECT_GT(average.abs().max().item<float>(), 0);
    const auto again = other.state_dict();
    EXPECT_EQ(again.groups.at(1).options, state.groups.at(1).options);
    EXPECT_EQ(again.params.at("fc1.weight").scalars, state.params.at("fc1.weight").scalars);
    EXPECT_TRUE(torch::equal(again.params.at("fc1.weight").tensors.at("exp_avg"), average));
  });
}

TEST(OptimizersPage, LambAndNovoGrad) {
  on_two_stages([](Net net, Net second) {
    smp::DistributedModel<Net> model(net);
    smp::DistributedModel<Net> other(second, smp::ModelOptions().name("other"));
    smp::DistributedOptimizer<smp::optim::Lamb> lamb(
        model->parameters(), smp::optim::LambOptions(2e-3).weight_decay(0.01).max_grad_norm(1));
    smp::DistributedOptimizer<smp::optim::NovoGrad> novograd(
        other->parameters(), smp::optim::NovoGradOptions(1e-2).betas({0.95, 0.98}));
    auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = torch::cross_entropy_loss(model(x) + other(x), y);
      model->backward(loss);
      return loss;
    });
    double before = 0, after = 0;
    for (int i = 0; i < 20; ++i) {
      lamb.zero_grad();
      novograd.zero_grad();
      after = train(inputs(), targets()).reduce_mean().item<double>();
      if (i == 0) before = after;
      lamb.step();
      novograd.step();
    }
    EXPECT_LT(after, before);
  });
}

TEST(OptimizersPage, Fused) {
  on_two_stages([](Net net, Net) {
    smp::DistributedModel<Net> model(net);
    smp::DistributedOptimizer<smp::optim::FusedAdamW> optimizer(model->parameters(),
                                                                torch::optim::AdamWOptions(1e-3));
    auto train = make_training(model);
    double before = 0, after = 0;
    for (int i = 0; i < 10; ++i) {
      optimizer.zero_grad();
      after = train(inputs(), targets()).reduce_mean().item<double>();
      if (i == 0) before = after;
      optimizer.step();
    }
    EXPECT_LT(after, before);
  });
}

}  // namespace
