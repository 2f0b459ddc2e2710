// SPDX-License-Identifier: Apache-2.0
// Batches of many sizes on ranks that are processes, and the heap after them.

#include "tests/smp/batch_shapes.h"

namespace smp::testing {
namespace {

TEST(GrowthOfProcesses, AnotherBatchSizeLeavesTheHeapAsItIs) {
  torch::set_num_threads(1);
  init(Config().ddp(true).microbatches(2));
  expect_little_growth(1);
}

}  // namespace
}  // namespace smp::testing
