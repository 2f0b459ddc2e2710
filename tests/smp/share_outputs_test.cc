// SPDX-License-Identifier: Apache-2.0
// The outputs of a step function on the ranks of a pipeline.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tuple>

#include "smp/smp.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

torch::nn::Sequential make_net() {
  torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  for (size_t i = 0; i < 2; ++i) {
    set_partition(*net->ptr(i), static_cast<int>(i));
    for (const auto& parameter : net->ptr(i)->parameters()) {
      torch::nn::init::constant_(parameter, 0.5);  // sums are exact in any order
    }
  }
  return net;
}

/// Runs a step that returns a loss and outputs on two ranks, of which the second computes both.
template <class Check>
void returned(const StepOptions& options, const Check& check) {
  torch::set_num_threads(1);
  run_as_threads(2, stages(2), [&] {
    torch::nn::Sequential net = make_net();
    DistributedModel<torch::nn::Sequential> model(net);
    auto train = step(
        [&](torch::Tensor x) {
          const auto y = model(x);
          auto loss = y.sum();
          model->backward(loss);
          return std::make_tuple(loss, y);
        },
        options);
    const auto [loss, y] = train(torch::ones({4, 2}));
    check(loss, y);
  });
}

TEST(ShareOutputs, AllRanksHaveThemByDefault) {
  returned({}, [](const StepOutput& loss, const StepOutput& y) {
    EXPECT_EQ(y.concat().sizes(), (std::vector<int64_t>{4, 2}));
    EXPECT_TRUE(torch::equal(loss.reduce_sum(), y.concat().sum()));
  });
}

TEST(ShareOutputs, OnlyNumbersWhereTheProgramSaysSo) {
  returned(StepOptions().share_outputs(false), [](const StepOutput& loss, const StepOutput& y) {
    EXPECT_TRUE(loss.reduce_mean().defined());
    ASSERT_EQ(y.outputs().size(), 2u);
    EXPECT_EQ(y.outputs()[0].defined(), rank() == 1);
    if (rank() == 1) {
      EXPECT_TRUE(torch::equal(loss.reduce_sum(), y.concat().sum()));
      return;
    }
    for (const auto& call : {std::function<void()>([&] { (void)y.concat(); }),
                             std::function<void()>([&] { (void)y.stack(); }),
                             std::function<void()>([&] { (void)y.reduce_mean(); })}) {
      expect_has(error_of<UsageError>(call),
                 {"a StepOutput is not on this rank: its step function was made with "
                  "StepOptions().share_outputs(false), so only the rank that computes it has it"});
    }
  });
}

}  // namespace
}  // namespace smp::testing
