// SPDX-License-Identifier: Apache-2.0
// Autocast, sharded parameters and a leaf module on ranks that are processes.

#include "tests/smp/gated.h"

namespace smp::testing {
namespace {

TEST(MpiAutocast, ShardedParametersAndALeaf) {
  torch::set_num_threads(1);
  GatedTraining training;
  init(gated_config(kGatedReplicas));
  ASSERT_EQ(size(), kGatedReplicas);
  training.train();
}

}  // namespace
}  // namespace smp::testing
