// SPDX-License-Identifier: Apache-2.0
// Batches of many shapes on ranks that are processes.

#include "tests/smp/batch_shapes.h"

namespace smp::testing {
namespace {

TEST(GrowthOfProcesses, AnotherBatchShapeTakesNothingOfThem) {
  init(stages(4));
  expect_one_growth(70);
}

}  // namespace
}  // namespace smp::testing
