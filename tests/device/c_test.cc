// SPDX-License-Identifier: Apache-2.0
// The C interface on a device, with memory there: bits are those of the CPU, whose kernels it has.
#include <ATen/dlpack.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "tests/c/interface.h"
#include "tests/device/fake_device.h"
#include "tests/error_of.h"

namespace smp::testing {
namespace {

/// A tensor of the interface on memory of the device.
smp_tensor view_on_device(const torch::Tensor& tensor) {
  smp_tensor result = view(tensor);
  result.device = SMP_GPU;
  result.device_index = tensor.device().index();
  return result;
}

torch::Tensor on_device(const torch::Tensor& tensor, int index) {
  auto moved = tensor.to(fake_device(index));
  at::accelerator::getCurrentStream(moved.device().index()).synchronize();
  return moved;
}

/// Results of a session.
struct Seen {
  std::vector<double> losses;
  std::vector<torch::Tensor> weights;
  torch::Tensor outputs;
};

/// Computes on the fake device `device`, with memory on `memory`; negative numbers: on the CPU.
Seen train(int device, int memory) {
  Seen run;
  smp_session* session = nullptr;
  expect_ok(smp_open(kTwoMicrobatches, &session));
  if (device >= 0) expect_ok(smp_set_device(session, SMP_GPU, device));
  expect_ok(smp_load(session, kTrain, kEval));
  expect_ok(smp_optimizer(session, "sgd", R"({"lr": 0.1, "clip_grad_norm": 0.5})"));
  const auto place = [&](const torch::Tensor& tensor) {
    return memory < 0 ? tensor : on_device(tensor, memory);
  };
  const auto describe = [&](const torch::Tensor& tensor) {
    return memory < 0 ? view(tensor) : view_on_device(tensor);
  };
  for (const Batch& batch : batches()) {
    const auto x_memory = place(batch.x), y_memory = place(batch.y);
    const smp_tensor x = describe(x_memory), y = describe(y_memory);
    double loss = -1;
    expect_ok(smp_train(session, &x, 1, "mse", &y, &loss));
    run.losses.push_back(loss);
  }
  const auto x_memory = place(batches(1).front().x), result = place(torch::zeros({8, 2}));
  const smp_tensor x = describe(x_memory);
  smp_tensor outputs = describe(result);
  expect_ok(smp_evaluate(session, &x, 1, nullptr, nullptr, nullptr, &outputs, 1));
  run.outputs = result.cpu();
  int64_t count = 0;
  expect_ok(smp_gather_state(session, &count));
  for (int64_t i = 0; i < count; ++i) {
    smp_tensor tensor{};
    tensor.struct_size = sizeof tensor;
    expect_ok(smp_state(session, i, &tensor));
    EXPECT_EQ(tensor.device, SMP_CPU);
    const std::vector<int64_t> sizes(tensor.sizes, tensor.sizes + tensor.dims);
    run.weights.push_back(torch::from_blob(tensor.data, sizes).clone());
  }
  expect_ok(smp_close(session));
  return run;
}

void expect_equal(const Seen& got, const Seen& wanted) {
  EXPECT_EQ(got.losses, wanted.losses);
  EXPECT_TRUE(torch::equal(got.outputs, wanted.outputs));
  ASSERT_EQ(got.weights.size(), wanted.weights.size());
  for (size_t i = 0; i < wanted.weights.size(); ++i) {
    EXPECT_TRUE(torch::equal(got.weights[i], wanted.weights[i])) << i;
  }
}

class COnDevice : public ::testing::Test {
 protected:
  void SetUp() override { expect_ok(smp_set_threads(1)); }
};

TEST_F(COnDevice, TrainsAsOnTheCpu) {
  const Seen wanted = train(-1, -1);
  expect_equal(train(2, -1), wanted);  // the host's memory
  expect_equal(train(2, 2), wanted);   // the device's
  expect_equal(train(2, 1), wanted);   // another one's
  expect_equal(train(-1, 1), wanted);  // computes on the CPU
}

TEST_F(COnDevice, RunsAModelOnMemoryOfTheDevice) {
  const auto x = batches(1).front().x;
  const auto wanted = torch::zeros({8, 2}), got = on_device(torch::zeros({8, 2}), 3);
  const auto x_there = on_device(x, 3);
  smp_model* model = nullptr;
  expect_ok(smp_model_open(kEval, &model));
  const smp_tensor host = view(x), device = view_on_device(x_there);
  smp_tensor output = view(wanted), output_there = view_on_device(got);
  expect_ok(smp_model_run(model, &host, 1, &output, 1));
  expect_ok(smp_model_run(model, &device, 1, &output_there, 1));
  EXPECT_TRUE(torch::equal(got.cpu(), wanted));
  expect_ok(smp_model_close(model));
}

TEST_F(COnDevice, DevicesThatAreNone) {
  smp_model* model = nullptr;
  expect_ok(smp_model_open(kEval, &model));
  smp_tensor x = view(batches(1).front().x);
  x.device = SMP_GPU;
  x.device_index = 4;
  expect_error(smp_model_run(model, &x, 1, nullptr, 0), SMP_ERROR_USAGE,
               {"input 0: device_index is 4, and this process has 4 GPUs. Give a number from 0"});
  expect_ok(smp_model_close(model));
  smp_session* session = nullptr;
  expect_ok(smp_open(nullptr, &session));
  expect_error(smp_set_device(session, SMP_GPU, -1), SMP_ERROR_USAGE,
               {"the session: device_index is -1, and this process has 4 GPUs"});
  EXPECT_EQ(smp_is_alive(session), 1);
  expect_ok(smp_close(session));
}

TEST_F(COnDevice, DlpackOfTheDevice) {
  const auto x = batches(1).front().x;
  const auto x_there = on_device(x, 1);
  smp_model* model = nullptr;
  expect_ok(smp_model_open(kEval, &model));
  const auto wanted = torch::zeros({8, 2}), got = torch::zeros({8, 2});
  const smp_tensor host = view(x);
  smp_tensor first = view(wanted), second = view(got);
  expect_ok(smp_model_run(model, &host, 1, &first, 1));

  int64_t sizes[] = {8, 3};
  int given_back = 0;
  DLManagedTensor lent{};
  lent.dl_tensor = {x_there.data_ptr(), {kDLExtDev, 1}, 2, {kDLFloat, 32, 1}, sizes, nullptr, 0};
  lent.manager_ctx = &given_back;
  lent.deleter = [](DLManagedTensor* self) { ++*static_cast<int*>(self->manager_ctx); };
  smp_tensor input{};
  input.struct_size = sizeof input;
  input.dlpack = &lent;
  expect_ok(smp_model_run(model, &input, 1, &second, 1));
  EXPECT_TRUE(torch::equal(got, wanted));
  EXPECT_EQ(given_back, 1);
  expect_ok(smp_model_close(model));
}

}  // namespace
}  // namespace smp::testing
