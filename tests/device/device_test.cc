// SPDX-License-Identifier: Apache-2.0
// The library on a device other than the CPU, apart from the numbers (parity_suite.cc).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <cmath>

#include "graph/devices.h"
#include "graph/graph.h"
#include "graph/random.h"
#include "smp/smp.h"
#include "tests/device/fake_device.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

uint64_t seed_of(at::Device device) {
  return at::globalContext().defaultGenerator(device).current_seed();
}

/// Returns what is drawn on the tensor's device and on the CPU, and the seeds that the default
/// generators of both have meanwhile.
std::vector<torch::Tensor> draws(const torch::Tensor& x) {
  return {torch::rand({4}, x.device()).cpu(), torch::rand({4}),
          torch::tensor({static_cast<int64_t>(seed_of(x.device())),
                         static_cast<int64_t>(seed_of(at::kCPU))})};
}

TORCH_LIBRARY(smp_device_test, m) {
  m.def("draws(Tensor x) -> Tensor[]");
  m.impl("draws", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &draws));
}

TEST(Device, RandomOperatorsDrawFromTheKeyedGeneratorOfTheirDevice) {
  torch::manual_seed(3);
  const auto before = seed_of(fake_device(1));
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("smp_device_test::draws", "");
  torch::jit::Stack stack = {torch::zeros({2}, fake_device(1))};
  graph::call_seeded(op, stack, 77);
  const std::vector<torch::Tensor> drawn = stack[0].toTensorVector();
  const auto expected = torch::rand({4}, at::detail::createCPUGenerator(77));
  EXPECT_TRUE(torch::equal(drawn[0], expected)) << "on the device";
  EXPECT_TRUE(torch::equal(drawn[1], expected)) << "on the CPU";
  EXPECT_TRUE(torch::equal(drawn[2], torch::tensor({int64_t{77}, int64_t{3}})));
  EXPECT_EQ(seed_of(fake_device(1)), before) << "put back";
  EXPECT_EQ(seed_of(at::kCPU), 3u);
}

TEST(Device, SetDeviceMakesItTheCurrentOne) {
  set_device(1);
  EXPECT_EQ(graph::with_index(fake_device().type()), fake_device(1));
  set_device(0);
  EXPECT_EQ(graph::with_index(fake_device().type()), fake_device(0));
}

TEST(Device, GraphsOfRanksWithDevicesOfTheirOwnAreTheSame) {
  const auto text = [](at::Device device) {
    return graph::TensorMeta::of(torch::zeros({2, 3}, device)).to_string();
  };
  EXPECT_EQ(text(fake_device(0)), "f32[2, 3]@fake");
  EXPECT_EQ(text(fake_device(0)), text(fake_device(1)));
}

TEST(Device, RefusesAModelOnTwoDevices) {
  const auto text = error_of_run<UsageError>(1, stages(1), [] {
    Mlp net;
    move_to_fake({net->in->weight, net->in->bias}, fake_device());
    DistributedModel<Mlp> model(net);
    auto train = make_training(model);
    train(torch::randn({4, MlpImpl::kWidth}).to(fake_device()),
          torch::randn({4, 1}).to(fake_device()));
  });
  expect_has(text, {"\"hidden0.weight\" is on device cpu, and this rank computes on fake:0, where "
                    "\"in.weight\" is",
                    "Leave modules on the CPU and call smp::set_device(smp::local_rank())"});
}

TEST(Device, RefusesAModelOnAnotherDeviceThanTheChosenOne) {
  const auto text = error_of_run<UsageError>(1, stages(1), [] {
    set_device(1);
    Mlp net;
    move_to_fake(net->parameters(), fake_device(0));
    DistributedModel<Mlp> model(net);
    auto train = make_training(model);
    train(torch::randn({4, MlpImpl::kWidth}), torch::randn({4, 1}));
  });
  expect_has(text, {"\"in.weight\" is on device fake:0, and this rank computes on fake:1, which "
                    "smp::set_device chose"});
}

TEST(Device, RefusesAnotherDeviceAfterTheFirstStep) {
  const auto text = error_of_run<UsageError>(1, stages(1), [] {
    set_device(1);
    Mlp net;
    DistributedModel<Mlp> model(net);
    auto train = make_training(model);
    train(torch::randn({4, MlpImpl::kWidth}), torch::randn({4, 1}));
    set_device(1);
    set_device(2);
  });
  expect_has(text, {"smp::set_device chose fake:2 after the first step, which has put this rank's "
                    "part of the models on fake:1"});
}

TEST(Device, RefusesRanksThatChoseDevicesOfTwoKinds) {
  const auto text = error_of_run<UsageError>(2, stages(2), [] {
    if (rank() == 1) set_device(1);
    Mlp net;
    DistributedModel<Mlp> model(net);
    auto train = make_training(model);
    train(torch::randn({4, MlpImpl::kWidth}), torch::randn({4, 1}));
  });
  expect_has(text, {"the ranks compute on different kinds of devices: rank 0 on CPU, rank 1 on ",
                    "Call smp::set_device on every rank or on none"});
}

TEST(Device, RefusesRanksOnDevicesOfTwoKinds) {
  const auto text = error_of_run<UsageError>(2, stages(2), [] {
    Mlp net;
    if (rank() == 1) move_to_fake(net->parameters(), fake_device());
    DistributedModel<Mlp> model(net);
    auto train = make_training(model);
    train(torch::randn({4, MlpImpl::kWidth}), torch::randn({4, 1}));
  });
  expect_has(text, {"the model differs between ranks", "@fake"});
}

TEST(Device, RefusesInputsOfAnotherDevice) {
  const auto text = error_of_run<UsageError>(1, stages(1), [] {
    Mlp net;
    move_to_fake(net->parameters(), fake_device());
    DistributedModel<Mlp> model(net);
    auto train = make_training(model);
    train(torch::randn({4, MlpImpl::kWidth}).to(fake_device(1)), torch::randn({4, 1}));
  });
  expect_has(text, {"input tensor 0 is on device fake:1, and this rank computes on fake:0",
                    "Leave the input on the CPU, or move it there: x.to(smp::device())"});
}

/// It is read beside what the next step computes.
TEST(Device, ALossThatIsNotFiniteIsFoundInTheNextStep) {
  ::testing::internal::CaptureStderr();
  run_as_threads(1, stages(1), [] {
    Mlp net;
    set_device(1);
    DistributedModel<Mlp> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    auto train = step([&](torch::Tensor x) { model->backward(model(x).square().mean()); },
                      StepOptions().name("train"));
    for (const double factor : {1.0, std::nan(""), 1.0}) {
      optimizer.zero_grad();
      train(factor * torch::ones({4, MlpImpl::kWidth}));
    }
  });
  expect_has(
      ::testing::internal::GetCapturedStderr(),
      {"step function \"train\", call 2: the value that model->backward starts from is nan"});
}

}  // namespace
}  // namespace smp::testing
