// SPDX-License-Identifier: Apache-2.0
// The library on a device other than the CPU, apart from the numbers (parity_suite.cc).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <cmath>
#include <cstdlib>

#include "graph/devices.h"
#include "graph/graph.h"
#include "graph/random.h"
#include "graph/shapes.h"
#include "smp/smp.h"
#include "tests/device/fake_device.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

uint64_t seed_of(at::Device device) {
  return at::globalContext().defaultGenerator(device).current_seed();
}

/// Returns the numbers drawn on the tensor's device and on the CPU, and the seeds that the default
/// generators of both have meanwhile.
std::vector<torch::Tensor> draws(const torch::Tensor& x) {
  return {torch::rand({4}, x.device()).cpu(), torch::rand({4}),
          torch::tensor({static_cast<int64_t>(seed_of(x.device())),
                         static_cast<int64_t>(seed_of(at::kCPU))})};
}

/// The first elements of the tensors on which the device's kernels were called.
std::vector<float> device_calls;

torch::Tensor on_device(const torch::Tensor& x) {
  device_calls.push_back(x.flatten()[0].item<float>());
  return torch::empty({x.size(0)}, x.options());
}

torch::Tensor refused_on_device(const torch::Tensor& x) {
  on_device(x);
  TORCH_CHECK(false, "asserts on the device");
}

torch::Tensor ones_on_cpu(const torch::Tensor& x) {
  TORCH_CHECK(x.flatten()[0].item<float>() == 1, "takes ones only");
  return torch::empty({x.size(0)}, x.options());
}

/// Like libtorch's transforms of Fourier.
torch::Tensor no_half_on_cpu(const torch::Tensor& x) {
  TORCH_CHECK(x.scalar_type() != torch::kHalf, "Unsupported dtype Half");
  return torch::empty({x.size(0)}, x.options());
}

/// How many bytes after a multiple of 64 a tensor begins.
torch::Tensor shift_on_device(const torch::Tensor& x) {
  const auto address = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  return torch::full({1}, static_cast<int64_t>(address % 64), x.options());
}

TORCH_LIBRARY(smp_device_test, m) {
  m.def("shift(Tensor x) -> Tensor");
  m.impl("shift", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &shift_on_device));
  m.def("draws(Tensor x) -> Tensor[]");
  m.impl("draws", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &draws));
  m.def("takes_ones(Tensor x) -> Tensor");
  m.impl("takes_ones", torch::dispatch(c10::DispatchKey::CPU, &ones_on_cpu));
  m.impl("takes_ones", torch::dispatch(c10::DispatchKey::PrivateUse1, &refused_on_device));
  m.def("has_no_cpu_kernel(Tensor x) -> Tensor");
  m.impl("has_no_cpu_kernel", torch::dispatch(c10::DispatchKey::PrivateUse1, &on_device));
  m.def("has_no_half_on_cpu(Tensor x) -> Tensor");
  m.impl("has_no_half_on_cpu", torch::dispatch(c10::DispatchKey::CPU, &no_half_on_cpu));
  m.impl("has_no_half_on_cpu", torch::dispatch(c10::DispatchKey::PrivateUse1, &on_device));
  m.def("takes_nothing(Tensor x) -> Tensor");
  m.impl("takes_nothing", torch::dispatch(c10::DispatchKey::PrivateUse1, &refused_on_device));
}

/// Calls one of these on the shape of a tensor of the device. Returns the shape of its result.
torch::Tensor shape_of(const char* name, at::ScalarType type = torch::kFloat) {
  device_calls.clear();
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  graph::TensorMeta meta = graph::TensorMeta::of(torch::zeros({3, 2}, type));
  meta.device = fake_device();
  torch::jit::Stack stack = {graph::make_shape_tensor(meta)};
  graph::call_on_shapes(op, stack, fake_device());
  return stack[0].toTensor();
}

/// A kernel of a GPU that does not like its arguments ends the GPU for the process.
TEST(Device, ShapesAreFoundOnTheCpuWhereItHasAKernel) {
  const torch::Tensor shape = shape_of("smp_device_test::takes_ones");
  EXPECT_TRUE(shape.is_meta());
  EXPECT_EQ(shape.sizes(), at::IntArrayRef({3}));
  EXPECT_EQ(device_calls, std::vector<float>());
}

TEST(Device, ShapesAreFoundOnZerosOfTheDeviceWhereTheCpuHasNoKernel) {
  EXPECT_EQ(shape_of("smp_device_test::has_no_cpu_kernel").sizes(), at::IntArrayRef({3}));
  EXPECT_EQ(device_calls, std::vector<float>{0});
}

TEST(Device, ShapesAreFoundOnZerosOfTheDeviceWhereTheCpuRefusesTheType) {
  EXPECT_EQ(shape_of("smp_device_test::has_no_half_on_cpu").sizes(), at::IntArrayRef({3}));
  EXPECT_EQ(device_calls, std::vector<float>()) << "float32";
  const torch::Tensor half = shape_of("smp_device_test::has_no_half_on_cpu", torch::kHalf);
  EXPECT_TRUE(half.is_meta());
  EXPECT_EQ(half.sizes(), at::IntArrayRef({3}));
  EXPECT_EQ(half.scalar_type(), torch::kHalf);
  EXPECT_EQ(device_calls, std::vector<float>{0});
}

TEST(Device, IsNotTriedWithOnes) {
  const auto text = error_of<c10::Error>([] { shape_of("smp_device_test::takes_nothing"); });
  expect_has(text, {"asserts on the device"});
  EXPECT_EQ(device_calls, std::vector<float>{0});
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

/// Kernels round otherwise elsewhere. Samples of 28 bytes would begin there.
TEST(Device, MicrobatchesBeginAtMultiplesOf64Bytes) {
  run_as_threads(1, Config().microbatches(4), [] {
    set_device(0);
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("smp_device_test::shift", "");
    const auto shift = op.typed<torch::Tensor(const torch::Tensor&)>();
    torch::nn::Linear net(7, 7);
    DistributedModel<torch::nn::Linear> model(net);
    auto shifts = step([&](torch::Tensor x, torch::Tensor all) {
      return std::vector<torch::Tensor>{shift.call(x), shift.call(all), x.clone(), net(x)};
    });
    const auto batch = torch::randn({12, 7});
    for (const auto& given : {batch, batch.to(fake_device())}) {
      const auto outputs = shifts(given, whole(given.narrow(0, 1, 7)));
      EXPECT_TRUE(torch::equal(outputs[0].concat().cpu(), torch::zeros({4}))) << given.device();
      EXPECT_TRUE(torch::equal(outputs[1].concat().cpu(), torch::zeros({4}))) << given.device();
      EXPECT_TRUE(torch::equal(outputs[2].concat().cpu(), batch)) << given.device();
    }
  });
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

/// Puts back at its end the settings of `"deterministic"` for the process.
class Determinism : public ::testing::Test {
 protected:
  void SetUp() override { unsetenv(kWorkspace); }
  void TearDown() override {
    at::globalContext().setDeterministicAlgorithms(false, false);
    at::globalContext().setDeterministicCuDNN(false);
    at::globalContext().setBenchmarkCuDNN(false);
    unsetenv(kWorkspace);
  }

  static constexpr const char* kWorkspace = "CUBLAS_WORKSPACE_CONFIG";
};

/// Trains on the device, or on the CPU for -1. Returns the weights.
Named train_mlp(const Config& config, int device) {
  Named weights;
  torch::manual_seed(4);
  Mlp net;
  const auto x = torch::randn({4, MlpImpl::kWidth}), y = torch::randn({4, 1});
  run_as_threads(1, config, [&] {
    if (device >= 0) set_device(device);
    DistributedModel<Mlp> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    auto train = make_training(model);
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      train(x, y);
      optimizer.step();
    }
    weights = to_map(model->state_dict());
  });
  return weights;
}

TEST_F(Determinism, OneParameterSetsAllThatBitsOnAGpuNeed) {
  at::globalContext().setBenchmarkCuDNN(true);
  run_as_threads(1, stages(1).deterministic(true), [] {
    EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
    EXPECT_FALSE(at::globalContext().deterministicAlgorithmsWarnOnly());
    EXPECT_TRUE(at::globalContext().deterministicCuDNN());
    EXPECT_FALSE(at::globalContext().benchmarkCuDNN());
    EXPECT_STREQ(std::getenv(kWorkspace), ":4096:8");
  });
}

TEST_F(Determinism, IsLeftAsItIsWithoutTheParameter) {
  run_as_threads(1, stages(1), [] {
    EXPECT_FALSE(at::globalContext().deterministicAlgorithms());
    EXPECT_EQ(std::getenv(kWorkspace), nullptr);
  });
}

TEST_F(Determinism, KeepsAWorkspaceThatRepeatsAndRefusesOthers) {
  setenv(kWorkspace, ":16:8", 1);
  run_as_threads(1, stages(1).deterministic(true), [] {});
  EXPECT_STREQ(std::getenv(kWorkspace), ":16:8");
  setenv(kWorkspace, ":0:0", 1);
  const auto text =
      error_of<ConfigError>([] { run_as_threads(1, stages(1).deterministic(true), [] {}); });
  expect_has(text,
             {"config key \"deterministic\": the environment has "
              "CUBLAS_WORKSPACE_CONFIG=:0:0, with which sums of cuBLAS may differ from run to "
              "run. Unset it, or set it to :4096:8 or :16:8"});
}

TEST_F(Determinism, ChangesNoBitsWhereKernelsRepeatAnyway) {
  for (const int device : {-1, 1}) {
    const Named without = train_mlp(stages(1), device);
    const Named with = train_mlp(stages(1).deterministic(true), device);
    expect_equal(with, without, "weights");
    TearDown();
  }
}

/// `put_` has no kernel whose bits repeat where two indices are the same, on the CPU neither.
TEST_F(Determinism, RefusesAnOperatorWithoutSuchAKernelByName) {
  const auto text = error_of<c10::Error>([] {
    run_as_threads(1, stages(1).deterministic(true), [] {
      Mlp net;
      DistributedModel<Mlp> model(net);
      auto train = step([&](torch::Tensor x) {
        const auto index = torch::zeros({2}, x.options().dtype(torch::kLong));
        const auto row = x.put(index, torch::ones({2}, x.options()));
        model->backward(model(row).square().mean());
      });
      train(torch::ones({4, MlpImpl::kWidth}));
    });
  });
  expect_has(
      text,
      {"put_ does not have a deterministic implementation",
       "deterministic algorithms are on (\"deterministic\": true, or at::globalContext()), so "
       "this operator is refused. Use another one in its place, or turn them off"});
}

/// Counts `part` in `text`.
int count_in(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST_F(Determinism, IsNamedOnceWhereItIsOffAndBitsMayDiffer) {
  const std::string line =
      "may differ from run to run: some kernels add in another order each time. "
      "\"deterministic\": true takes those that do not";
  const auto log_of = [](const Config& config, int device) {
    ::testing::internal::CaptureStderr();
    train_mlp(config, device);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(count_in(log_of(stages(1), 1), "bits on fake:1 " + line), 1) << "two steps";
  EXPECT_EQ(count_in(log_of(stages(1), -1), line), 0) << "on the CPU";
  EXPECT_EQ(count_in(log_of(stages(1).deterministic(true), 1), line), 0) << "on";
}

TEST(Device, TheLogSaysOnceWhichWayTensorsGo) {
  ::testing::internal::CaptureStderr();
  run_as_threads(2, stages(2), [] {
    set_device(rank());
    Mlp net;
    DistributedModel<Mlp> model(net);
    auto train = make_training(model);
    for (int i = 0; i < 2; ++i) train(torch::ones({4, MlpImpl::kWidth}), torch::ones({4, 1}));
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(count_in(log,
                     "tensors on fake:0 go on the device, since the ranks are threads of one "
                     "process. Groups: pp[0,1]"),
            1)
      << log;
}

/// It is read beside the next step's computations.
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
