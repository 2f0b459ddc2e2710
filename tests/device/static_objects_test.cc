// SPDX-License-Identifier: Apache-2.0
// Under mpirun, four ranks that are processes: the program's objects are static, so that they end
// after those that libtorch has for the device, of which the fake device knows.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "smp/smp.h"
#include "tests/device/fake_device.h"

namespace smp::testing {
namespace {

using torch::nn::Linear;

TEST(StaticObjects, OutliveTheWorld) {
  static std::vector<std::shared_ptr<void>> objects;
  init(Config().partitions(2).microbatches(2).ddp(true));
  set_device(local_rank());
  const torch::nn::Sequential net(Linear(3, 4), Linear(4, 2));
  const auto model = std::make_shared<DistributedModel<torch::nn::Sequential>>(net);
  const auto optimizer =
      std::make_shared<DistributedOptimizer<torch::optim::SGD>>((*model)->parameters(), 0.1);
  auto train = step([model = *model](torch::Tensor x) {
    auto loss = model(x).square().mean();
    model->backward(loss);
    return loss;
  });
  train(torch::ones({4, 3}));
  optimizer->step();
  EXPECT_TRUE((*model)->partitioned());
  objects = {model, optimizer, std::make_shared<decltype(train)>(train)};
}

}  // namespace
}  // namespace smp::testing
