// SPDX-License-Identifier: Apache-2.0
// Sessions of C++ programs on a communicator of their own.
#include <gtest/gtest.h>
#include <mpi.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "smp/mpi.h"
#include "smp/smp.h"
#include "tests/error_of.h"

namespace smp::testing {
namespace {

/// The losses of three steps.
std::vector<double> train() {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 2));
  DistributedModel<torch::nn::Sequential> model(net);
  DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(),
                                                    torch::optim::SGDOptions(0.1));
  auto run = step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = torch::mse_loss(model(x), y);
    model->backward(loss);
    return loss;
  });
  const auto x = torch::randn({8, 4}), y = torch::randn({8, 2});
  std::vector<double> losses;
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    losses.push_back(run(x, y).reduce_mean().item<double>());
    optimizer.step();
  }
  return losses;
}

TEST(InitOnCommunicator, OneSessionAfterAnother) {
  std::vector<double> losses;
  for (int partitions = 2; partitions >= 1; --partitions) {
    init(Config().partitions(partitions).microbatches(2).ddp(true), MPI_COMM_WORLD);
    EXPECT_TRUE(is_initialized());
    EXPECT_EQ(size(), 2);
    EXPECT_EQ(pp_size(), partitions);
    const auto again = train();
    if (losses.empty()) losses = again;
    EXPECT_EQ(again, losses);  // replicas are given the same batch
    shutdown();
    EXPECT_FALSE(is_initialized());
  }
}

TEST(InitOnCommunicator, OneSessionAtATime) {
  init(Config(), MPI_COMM_SELF);
  EXPECT_EQ(size(), 1);
  expect_has(error_of<UsageError>([] { init(Config(), MPI_COMM_SELF); }),
             {"a session was begun while another one is open in this process"});
  expect_has(error_of<UsageError>([] { init(Config()); }), {"smp::init was called twice"});
  EXPECT_EQ(size(), 1);
  shutdown();
}

}  // namespace
}  // namespace smp::testing
