// SPDX-License-Identifier: Apache-2.0
// The report of ranks about the memory of their devices.

#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <future>
#include <utility>

#include "comm/device/ipc_memory.h"
#include "partitioner/predict.h"
#include "runtime/runtime.h"
#include "runtime/step/planning.h"
#include "smp/smp.h"
#include "tests/action_hook.h"
#include "tests/device/fake_device.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr int64_t kMiB = 1 << 20;

at::Tensor mebibytes(int64_t count, int index) {
  return at::empty({count * kMiB}, at::TensorOptions(at::kByte).device(fake_device(index)));
}

/// Other tests have left nothing there but the cache's content.
void empty_cache() { c10::getDeviceAllocator(fake_device().type())->emptyCache(); }

TEST(DeviceMemory, IsThatOfTensorsAndOfTheCache) {
  run_as_threads(1, stages(1), [] {
    set_device(1);
    empty_cache();
    reset_peak_memory();
    const DeviceMemory before = device_memory().value();
    at::Tensor kept = mebibytes(3, 1), freed = mebibytes(2, 1);
    const at::Tensor elsewhere = mebibytes(5, 2);
    freed.reset();
    const DeviceMemory after = device_memory().value();
    EXPECT_EQ(after.device, fake_device(1));
    EXPECT_EQ(after.allocated - before.allocated, 3 * kMiB);
    EXPECT_EQ(after.peak - before.allocated, 5 * kMiB);
    EXPECT_EQ(after.held - before.held, 5 * kMiB);
    EXPECT_EQ(after.total - after.free, after.held);
    EXPECT_EQ(after.shared, before.shared);
    {
      const comm::MadeMemory shared(*comm::device_ipc(after.device.type()), after.device, 5000,
                                    /*openers=*/1, /*events=*/0);
      EXPECT_EQ(device_memory()->shared, before.shared + 5000);
    }
    EXPECT_EQ(device_memory()->shared, before.shared);
    reset_peak_memory();
    EXPECT_EQ(device_memory()->peak, after.allocated);
    empty_cache();
    EXPECT_EQ(device_memory()->held, after.allocated);
  });
}

TEST(DeviceMemory, TheReportHasARowForEachRank) {
  const FakeMemoryLimit limit(64 * kMiB);
  std::vector<std::string> reports(2);
  run_as_threads(2, stages(2), [&] {
    set_device(2 + rank());
    const at::Tensor kept = mebibytes(8 + rank(), 2 + rank());
    if (rank() == 0) empty_cache();
    smp::barrier();
    reset_peak_memory();
    reports[rank()] = memory_report();
  });
  EXPECT_EQ(reports[0], reports[1]);
  EXPECT_EQ(reports[0],
            "  rank  device  allocated     peak     held  shared      free        of\n"
            "  ----  ------  ---------  -------  -------  ------  --------  --------\n"
            "     0  fake:2    8.0 MiB  8.0 MiB  8.0 MiB       -  56.0 MiB  64.0 MiB\n"
            "     1  fake:3    9.0 MiB  9.0 MiB  9.0 MiB       -  55.0 MiB  64.0 MiB\n");
}

/// Keeps its result for backward.
struct LengthImpl : torch::nn::Module {
  LengthImpl() { other = register_parameter("other", torch::ones({1})); }
  torch::Tensor forward(const torch::Tensor& x) { return torch::hypot(x, other); }
  torch::Tensor other;
};
TORCH_MODULE(Length);

/// The first rank has sent as far ahead as messages may go, while the second has taken none.
TEST(DeviceMemory, PredictionsCountMessagesUnderWay) {
  constexpr int kCount = 3;
  const auto config = stages(2).microbatches(kCount).pipeline("simple").timeout_seconds(60);
  std::promise<void> sent;
  const std::shared_future<void> is_sent(sent.get_future());
  run_as_threads(2, config, [&] {
    set_device(2 + rank());
    torch::nn::Sequential net(Length{}, Length{});
    for (int i = 0; i < 2; ++i) set_partition(*net->children()[i], i);
    DistributedModel<torch::nn::Sequential> model(net);
    auto train = step([&](torch::Tensor x) {
      auto loss = net->forward(x).sum();
      model->backward(loss);
      return loss;
    });
    // A microbatch, and so a message, has a mebibyte.
    const auto x = torch::ones({kCount, kMiB / 4}).to(fake_device(2 + rank()));
    for (int i = 0; i < 2; ++i) train(x);
    bool has_begun = false;
    int64_t before = 0, held = 0;
    ActionHook hook([&](const pipeline::Action& action) {
      if (!std::exchange(has_begun, true)) {
        // The ranks have compared their inputs, which takes memory that is free again.
        reset_peak_memory();
        before = device_memory()->allocated;
      }
      if (!action.is_recv() || action.microbatch > 0) return;
      if (rank() == 1) return is_sent.wait();
      held = device_memory()->peak - before;
      sent.set_value();
    });
    runtime::Runtime& runtime = runtime::Runtime::get();
    runtime.execution.observers.push_back(&hook);
    train(x);
    runtime.execution.observers.clear();
    const auto model_of_step = runtime::step_model(runtime, kCount);
    const auto predicted =
        partitioner::predict(*runtime.first_step.graph, *runtime.first_step.plan, model_of_step);
    EXPECT_EQ(predicted.stages[rank()].messages, kCount * kMiB) << "rank " << rank();
    if (rank() == 1) return;
    // The results, which backward needs, and as many messages.
    EXPECT_EQ(held / kMiB, 2 * kCount);
    EXPECT_EQ(predicted.rank_memory[0] / kMiB, 2 * kCount);
  });
}

TEST(DeviceMemory, ThereIsNothingToSayOnTheCpu) {
  run_as_threads(2, stages(2), [] {
    EXPECT_FALSE(device_memory().has_value());
    reset_peak_memory();
    EXPECT_EQ(memory_report(), "");
  });
}

}  // namespace
}  // namespace smp::testing
