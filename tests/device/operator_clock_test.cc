// SPDX-License-Identifier: Apache-2.0
// The costs of operators on a device, by its own clock: each task of a stream of the fake device
// takes a millisecond of that, whatever the host takes to give it.

#include "graph/operator_clock.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "runtime/runtime.h"
#include "tests/device/fake_device.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr double kTask = 1000;  // us

TEST(OperatorClock, CountsWhatTheDeviceIsGiven) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor number = torch::zeros({4}).to(fake_device());
  graph::OperatorClock clock(fake_device());
  for (const int tasks : {1, 3, 0, 2}) {
    clock.start();
    for (int i = 0; i < tasks; ++i) number.add_(1);
    EXPECT_EQ(clock.stop(), tasks * kTask);
  }
  EXPECT_TRUE(torch::equal(number.cpu(), torch::full({4}, 6)));
}

TEST(OperatorClock, OfTheCpuIsThatOfTheHost) {
  graph::OperatorClock clock(at::kCPU);
  clock.start();
  const double first = clock.stop(), second = clock.stop();
  EXPECT_GE(first, 0);
  EXPECT_GE(second, first) << "since the start";
}

/// No operator costs a part of a task, as it would if the host's time counted.
TEST(OperatorClock, MeasuresGraphs) {
  torch::set_num_threads(1);
  run_as_threads(2, stages(2), [&] {
    set_device(rank());
    Mlp net(4);
    move_to_fake(net->parameters(), fake_device(rank()));
    DistributedModel<Mlp> model(net);
    make_training(model)(torch::ones({4, MlpImpl::kWidth}), torch::ones({4, 1}));
    const auto& measured = runtime::Runtime::get().first_step.measured;
    ASSERT_NE(measured, nullptr);
    double forward = 0, backward = 0;
    for (const auto& op : measured->operators) {
      for (const double us : {op.cost.forward_us, op.cost.backward_us}) {
        EXPECT_EQ(std::fmod(us, kTask), 0) << op.name() << " takes " << us;
      }
      forward += op.cost.forward_us;
      backward += op.cost.backward_us;
    }
    EXPECT_GT(forward, 4 * kTask);
    EXPECT_GT(backward, forward);
  });
}

}  // namespace
}  // namespace smp::testing
