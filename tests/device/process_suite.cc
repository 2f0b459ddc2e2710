// SPDX-License-Identifier: Apache-2.0
// Under mpirun, two ranks that are processes: messages pass through memory that both map. The first
// step moves each rank's part of the model to its device.

#include <gtest/gtest.h>

#include "tests/device/parity_suite.h"
#include "tests/device/text_net.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

TEST(DeviceProcesses, EqualPlainLibtorch) {
  constexpr int kMicrobatches = 4, kSteps = 3;
  init(stages(2).microbatches(kMicrobatches));
  const at::Device device = test_device(local_rank());
  torch::manual_seed(5);
  TextNet plain, net;
  copy_values(*plain, *net);
  move(*plain, device);
  set_device(device.index());
  DistributedModel<TextNet> model(net);
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  torch::optim::SGD plain_optimizer(unique_parameters(*plain), options);
  DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), options);
  auto train = step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = net->loss(x, y);
    model->backward(loss);
    return loss;
  });
  for (int i = 0; i < kSteps; ++i) {
    const auto x = torch::randint(TextNetImpl::kVocabulary, {8, TextNetImpl::kLength});
    const auto y = torch::randint(TextNetImpl::kVocabulary, {8, TextNetImpl::kLength});
    plain_optimizer.zero_grad();
    optimizer.zero_grad();
    const Tensors expected =
        plain_backward(unique_parameters(*plain), 1, kMicrobatches, [&](int m) {
          const KeyedRandom random(kSeed, "step 0", i, m);
          return plain->loss(part(x, kMicrobatches, m).to(device),
                             part(y, kMicrobatches, m).to(device));
        });
    expect_equal(train(x, y).outputs(), expected, "losses of step " + std::to_string(i));
    plain_optimizer.step();
    optimizer.step();
  }
  Named weights;
  for (const auto& [name, tensor] : state_of(*plain)) weights[name] = tensor.cpu();
  expect_equal(to_map(model->state_dict()), weights, "values");
}

}  // namespace
}  // namespace smp::testing
