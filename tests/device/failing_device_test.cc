// SPDX-License-Identifier: Apache-2.0
// A device that fails for good in the middle of training: the program goes on, and is told why.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "smp/smp.h"
#include "tests/device/fake_device.h"
#include "tests/device/text_net.h"
#include "tests/error_of.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

struct Case {
  std::string name;
  Config config;
  int ranks;
};

std::ostream& operator<<(std::ostream& out, const Case& tested) { return out << tested.name; }

/// Trains until an error ends it.
void train(const Case& tested, const std::vector<TextNet>& nets) {
  run_as_threads(tested.ranks, tested.config, [&] {
    set_device(rank());
    TextNet net = nets[rank()];
    DistributedModel<TextNet> model(net);
    DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(),
                                                        torch::optim::AdamWOptions(0.01));
    for (const TextBlock& block : net->blocks) set_activation_checkpointing(block);
    auto train_step = step([&](torch::Tensor x) {
      auto loss = net->loss(x, x);
      model->backward(loss);
      return loss;
    });
    const auto x = torch::ones({4, TextNetImpl::kLength}, torch::kLong);
    for (int i = 0; i < 100; ++i) {
      optimizer.zero_grad();
      train_step(x);
      optimizer.step();
    }
  });
}

class FailingDevices : public ::testing::TestWithParam<Case> {};

/// Destructors ask the device while the error unwinds, and none of them may throw.
TEST_P(FailingDevices, EndNoProgramAndAreNamed) {
  torch::set_num_threads(1);
  const Case& tested = GetParam();
  for (const int64_t kernels : {0, 20, 150, 500, 1000, 2000, 3000}) {
    for (int index = 0; index < tested.ranks; ++index) {
      torch::manual_seed(1);
      std::vector<TextNet> nets(tested.ranks);
      const FailingDevice failing(index, kernels);
      const auto text = error_of<c10::Error>([&] { train(tested, nets); });
      expect_has(text, {"device-side assert triggered"});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, FailingDevices,
    ::testing::Values(
        Case{"1 rank", Config().microbatches(2).timeout_seconds(60), 1},
        Case{"2 stages", Config().partitions(2).microbatches(4).timeout_seconds(60), 2},
        Case{"2 replicas, sharded",
             Config().ddp(true).shard_optimizer_state(true).timeout_seconds(60), 2},
        Case{"offloaded",
             Config().partitions(2).microbatches(2).offload_activations(true).timeout_seconds(60),
             2},
        Case{"graphs",
             Config().partitions(2).microbatches(2).cuda_graphs("auto").timeout_seconds(60), 2}));

/// The kernel that failed may be one before the operator that notices.
TEST(FailingDevice, TheOperatorThatNoticesIsNotBlamed) {
  const Case tested{"1 rank", Config().timeout_seconds(60), 1};
  std::string of_operator;
  for (int64_t kernels = 60; kernels < 600 && of_operator.empty(); kernels += 20) {
    torch::manual_seed(1);
    const std::vector<TextNet> nets(1);
    const FailingDevice failing(0, kernels);
    const auto text = error_of<c10::AcceleratorError>([&] { train(tested, nets); });
    if (text.find("operator ") != std::string::npos) of_operator = text;
  }
  expect_has(of_operator,
             {"noticed at operator ", "the device may have failed in an earlier operator",
              "CUDA_LAUNCH_BLOCKING=1"});
}

}  // namespace
}  // namespace smp::testing
