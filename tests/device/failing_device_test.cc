// SPDX-License-Identifier: Apache-2.0
// A device that fails for good in the middle of training: the program goes on, and is told why.

#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>
#include <string>
#include <vector>

#include "graph/devices.h"
#include "smp/smp.h"
#include "tests/device/fake_device.h"
#include "tests/device/text_net.h"
#include "tests/error_of.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kOfLibrary = "execution failed in a library";

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
      EXPECT_THAT(text, AnyOf(HasSubstr("device-side assert triggered"), HasSubstr(kOfLibrary)));
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

/// The kernel that failed may be one before the operator that notices, which a library's error, as
/// cuBLAS has them, does not tell.
TEST(FailingDevice, TheOperatorThatNoticesIsNotBlamed) {
  const Case tested{"1 rank", Config().timeout_seconds(60), 1};
  std::set<bool> of_library;  // for errors with an operator
  for (int64_t kernels = 60; kernels < 600 && of_library.size() < 2; kernels += 7) {
    torch::manual_seed(1);
    const std::vector<TextNet> nets(1);
    const FailingDevice failing(0, kernels);
    const auto text = error_of<c10::Error>([&] { train(tested, nets); });
    if (text.find("operator ") == std::string::npos) continue;
    of_library.insert(text.find(kOfLibrary) != std::string::npos);
    expect_has(text, {"noticed at operator ", "the device may have failed in an earlier operator",
                      "CUDA_LAUNCH_BLOCKING=1"});
  }
  EXPECT_THAT(of_library, ElementsAre(false, true));
}

TEST(FailingDevice, IsAskedWhetherItHasFailed) {
  EXPECT_FALSE(graph::current_device_has_failed());
  {
    const FailingDevice failing(0, 0);
    EXPECT_TRUE(graph::current_device_has_failed());
    const c10::DeviceGuard other(fake_device(1));
    EXPECT_FALSE(graph::current_device_has_failed());
  }
  EXPECT_FALSE(graph::current_device_has_failed());
}

}  // namespace
}  // namespace smp::testing
