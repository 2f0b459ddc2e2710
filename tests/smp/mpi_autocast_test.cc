// SPDX-License-Identifier: Apache-2.0
// Autocast, sharded parameters and a leaf module on ranks that are processes.

#include "tests/smp/gated.h"

namespace smp::testing {
namespace {

TEST(MpiAutocast, ShardedParametersAndALeaf) {
  auto training = gated_case(kGatedReplicas);
  training.run_ranks = [](int ranks, const Config& config, const auto& program) {
    init(config);
    ASSERT_EQ(size(), ranks);
    program();
  };
  const auto plain = training.run_plain(), got = training.run_on_ranks();
  for (size_t i = 0; i < plain.losses.size(); ++i) {
    for (size_t m = 2 * rank(); m < 2u * rank() + 2; ++m) {
      expect_equal(got.losses[i][m], plain.losses[i][m], "loss");
    }
  }
  expect_equal(got.weights, plain.weights, "weight");
}

}  // namespace
}  // namespace smp::testing
