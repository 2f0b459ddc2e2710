// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include "graph/allocations.h"
#include "tests/smp/batch_shapes.h"
#include "tests/smp/oracle.h"

// The costs of further graphs of a step function, beside the first.
namespace smp::testing {
namespace {

/// How much more memory this rank has after steps on `sizes` batches of other sizes.
int64_t growth_over(int sizes) {
  DistributedModel<Heavy> model{Heavy()};
  auto train = step([&](torch::Tensor x) {
    const auto loss = model(x);
    model->backward(loss);
    return loss;
  });
  const graph::Allocations allocations;
  for (int i = 0; i < 2; ++i)
    train(torch::ones({2, kWide}));  // gradients, and memory that it
                                     // keeps
  const int64_t before = allocations.now();
  for (int size = 2; size <= sizes; ++size) train(torch::ones({2 * size, kWide}));
  return allocations.now() - before;
}

TEST(Growth, AnotherBatchSizeNeedsNoMemoryForGradients) {
  torch::set_num_threads(1);
  const auto expect_little = [](int ranks, const Config& config) {
    run_as_threads(ranks, config, [&] {
      EXPECT_LT(growth_over(30), 20 * kMiB) << config.to_json() << ", rank " << rank();
    });
  };
  for (const int ranks : {1, 2}) expect_little(ranks, stages(ranks));
  expect_little(2, stages(1).ddp(true).shard_optimizer_state(true));
}

TEST(Growth, AnotherBatchSizeLeavesTheHeapAsItIs) {
  torch::set_num_threads(1);
  run_as_threads(2, Config().ddp(true).microbatches(2), [] { expect_little_growth(2); });
}

TEST(Growth, AnotherBatchShapeTakesNothingOfTheProcess) {
  torch::set_num_threads(1);
  for (const int ranks : {2, 4}) {
    run_as_threads(ranks, stages(ranks), [] { expect_one_growth(70); });
  }
}

TEST(Growth, SchedulesShareChannelsAmongBatchShapes) {
  torch::set_num_threads(1);
  for (const char* schedule : {"simple", "zb_h1", "interleaved_1f1b", "zbv", "auto"}) {
    SCOPED_TRACE(schedule);
    run_as_threads(2, stages(2).pipeline(schedule), [] {
      train_on({4, 64, 4, 8, 128, 2, 4, 64, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4}, /*pinned=*/false,
               [](size_t, const Tensors&, const Tensors&) {});
    });
  }
}

}  // namespace
}  // namespace smp::testing
