// SPDX-License-Identifier: Apache-2.0
#include "graph/random.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <limits>
#include <set>
#include <vector>

namespace smp::graph {
namespace {

constexpr uint64_t kStep0 = 0x7a88ec1817808a60;  // XXH64 of "step 0"
constexpr uint64_t kTrain = 0xd18f9b6611eb8e16;

/// From a program of its own, SplitMix64 after Vigna.
TEST(StreamSeed, HasTheDocumentedValues) {
  EXPECT_EQ(stream_seed({}, 0), 0x78ae5a9a6b5fd45eu);
  EXPECT_EQ(stream_seed({1, kStep0, 0, 0}, 0), 0x11274aa4e06e9e80u);
  EXPECT_EQ(stream_seed({7, kTrain, 3, 5}, 2), 0xc80e116214f212b3u);
  const uint64_t largest = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(stream_seed({largest, kTrain, 200, 15}, 40), 0x8b4c4e2c9270609du);
}

/// Normal numbers are drawn in pairs, and the generator keeps the second.
TEST(KeyedRandomScope, LeavesTheGeneratorAsItWas) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const auto draw = [type](int count) {
      std::vector<at::Tensor> numbers;
      for (int i = 0; i < count; ++i) numbers.push_back(at::randn({1}, type));
      numbers.push_back(at::rand({3}, type));
      return at::cat(numbers);
    };
    torch::manual_seed(5);
    draw(1);
    const at::Tensor expected = draw(2);
    torch::manual_seed(5);
    draw(1);
    {
      const KeyedRandomScope scope({7, kTrain, 3, 5});
      draw(3);
    }
    EXPECT_TRUE(at::equal(draw(2), expected)) << type;
  }
}

/// What the operator after `before` others draws.
std::vector<float> drawn(const RandomKey& key, int before) {
  const KeyedRandomScope scope(key);
  for (int i = 0; i < before; ++i) at::rand({1});
  const at::Tensor numbers = at::rand({8});
  return {numbers.const_data_ptr<float>(), numbers.const_data_ptr<float>() + 8};
}

TEST(StreamSeed, EachFieldOfTheKeyGivesOtherNumbers) {
  const RandomKey key{7, kTrain, 3, 5};
  std::set<std::vector<float>> seen{drawn(key, 2)};
  EXPECT_EQ(seen.count(drawn(key, 2)), 1u);
  EXPECT_TRUE(seen.insert(drawn({8, key.step_function, 3, 5}, 2)).second) << "seed";
  EXPECT_TRUE(seen.insert(drawn({7, kStep0, 3, 5}, 2)).second) << "step function";
  EXPECT_TRUE(seen.insert(drawn({7, key.step_function, 4, 5}, 2)).second) << "call";
  EXPECT_TRUE(seen.insert(drawn({7, key.step_function, 3, 6}, 2)).second) << "microbatch";
  EXPECT_TRUE(seen.insert(drawn(key, 3)).second) << "ordinal";
  // Fields do not make up for each other.
  EXPECT_TRUE(seen.insert(drawn({7, key.step_function, 5, 3}, 2)).second) << "call, microbatch";
}

}  // namespace
}  // namespace smp::graph
