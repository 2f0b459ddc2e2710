// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "partitioner/complete.h"
#include "partitioner/units.h"
#include "tests/partitioner/graph_builder.h"

namespace smp::partitioner::testing {
namespace {

using ::testing::ElementsAre;

/// Linear layers of three operators (with biases; else a product in place of addmm), each with a
/// weight of so many elements, and a bias of one.
GraphBuilder layers_of(const std::vector<int64_t>& elements, bool biases = false) {
  GraphBuilder b;
  Ref x = b.input(at::ones({2, 1}));
  for (size_t i = 0; i < elements.size(); ++i) {
    const std::string name = "fc" + std::to_string(i);
    const Ref weight = b.parameter(name + ".weight", at::ones({elements[i], 1}));
    x = biases ? b.linear(name, x, weight, b.parameter(name + ".bias", at::ones({1})))
               : b.op("aten::matmul", {x, b.op("aten::t", {weight})});
    x = b.op("aten::mean.dim", {x, c10::IValue(std::vector<int64_t>{1}), true, c10::IValue()});
  }
  b.backward(b.op("aten::sum", {x, c10::IValue()}));
  return b;
}

/// Stages of so many operators, and of the rest.
Plan plan_of(GraphBuilder& b, const std::vector<int>& lengths, const std::vector<int>& ranks,
             const std::map<std::string, int>& owners = {}) {
  std::vector<int> stages;
  for (size_t s = 0; s < lengths.size(); ++s) {
    stages.insert(stages.end(), static_cast<size_t>(lengths[s]), static_cast<int>(s));
  }
  stages.resize(b.graph().operators.size(), static_cast<int>(lengths.size()));
  return complete_plan(b.graph(), ranks, stages, owners);
}

Plan one_stage(GraphBuilder& b) { return plan_of(b, {}, {0}); }

ReplicaSharding sharding() { return ReplicaSharding().parameters(2); }

/// Elements of each unit.
std::vector<int64_t> sizes(const graph::Graph& graph, const Units& units) {
  std::vector<int64_t> result;
  for (const auto& parameters : units.parameters) {
    int64_t sum = 0;
    for (graph::ValueId id : parameters) sum += graph.values[id].meta.numel();
    result.push_back(sum);
  }
  return result;
}

std::vector<int64_t> sizes(GraphBuilder& b, const ReplicaSharding& sharding) {
  return sizes(b.graph(), find_units(b.graph(), one_stage(b), {}, sharding));
}

TEST(FindUnits, ReadTwoTypicalParameters) {
  auto equal = layers_of({100, 100, 100, 100, 100});
  EXPECT_THAT(sizes(equal, sharding()), ElementsAre(200, 200, 100));
  // The mean over elements is 350 / 1200 * 300 + ... = 350.
  auto block = layers_of({300, 100, 400, 400, 300, 100, 400, 400});
  EXPECT_THAT(sizes(block, sharding()), ElementsAre(800, 700, 900));
  auto vocabulary = layers_of({5000, 100, 100, 100, 100});
  EXPECT_THAT(sizes(vocabulary, sharding()), ElementsAre(5400)) << "one is as large as ten";
}

TEST(FindUnits, SmallParametersFillNone) {
  auto b = layers_of({100, 100, 100, 100, 100, 100}, /*biases=*/true);
  EXPECT_THAT(sizes(b, sharding().smallest(2)), ElementsAre(200, 200, 200));
  EXPECT_THAT(sizes(b, sharding()), ElementsAre(202, 202, 202));
  EXPECT_THAT(sizes(b, sharding().names(std::set<std::string>{"fc0.weight", "fc5.bias"})),
              ElementsAre(101))
      << "those that are known to be divided";
}

TEST(FindUnits, LeaveRoomForTheNext) {
  auto b = layers_of({100, 100, 100, 100});
  EXPECT_THAT(sizes(b, sharding().live(400)), ElementsAre(200, 200));
  EXPECT_THAT(sizes(b, sharding().live(399)), ElementsAre(100, 100, 100, 100));
  EXPECT_THAT(sizes(b, sharding().live(1)), ElementsAre(100, 100, 100, 100)) << "none is cut";
}

/// Its view is in the same unit, however little may be live: otherwise it would be gathered twice.
TEST(FindUnits, AWeightIsInOne) {
  auto b = layers_of({100, 50, 200, 100, 100, 10, 100}, /*biases=*/true);
  for (int64_t live = 1; live < 1400; ++live) {
    std::set<graph::ValueId> seen;
    for (const auto& parameters :
         find_units(b.graph(), one_stage(b), {}, sharding().live(live)).parameters) {
      for (graph::ValueId id : parameters) {
        EXPECT_TRUE(seen.insert(id).second) << b.graph().values[id].name << ", at most " << live;
      }
    }
  }
}

TEST(FindUnits, StagesAreDividedAndRegionsAreNot) {
  auto b = layers_of({100, 100, 100, 100, 100, 100});
  const auto& graph = b.graph();
  const Plan three_and_three = plan_of(b, {9}, {0, 1});
  const Units units = find_units(graph, three_and_three, {}, sharding());
  EXPECT_THAT(sizes(graph, units), ElementsAre(200, 100, 200, 100));
  EXPECT_EQ(divided_into_units(graph, three_and_three, units.of_operator).rank_of_stage,
            (std::vector<int>{0, 0, 1, 1}));
  std::vector<int> regions(graph.operators.size(), -1);
  std::fill(regions.begin() + 3, regions.begin() + 15, 7);
  EXPECT_THAT(sizes(graph, find_units(graph, one_stage(b), regions, sharding().live(2))),
              ElementsAre(100, 400, 100));
}

/// A tied weight is gathered by its owner alone.
TEST(FindUnits, CopiesAreNotGathered) {
  GraphBuilder b;
  const Ref tied = b.parameter("tied", at::ones({30}));
  Ref x = b.op("aten::mul.Tensor", {b.input(at::ones({30})), tied});
  x = b.op("aten::mul.Tensor", {x, b.parameter("other", at::ones({30}))});
  b.backward(b.op("aten::sum", {b.op("aten::mul.Tensor", {x, tied}), c10::IValue()}));
  const auto gathered = [&](const std::vector<int>& ranks, int owner) {
    const Plan plan = plan_of(b, {2}, ranks, {{"tied", owner}});
    const Units units = find_units(b.graph(), plan, {}, sharding());
    return std::pair(sizes(b.graph(), units), gathered_bytes(b.graph(), plan, units, sharding()));
  };
  using Got = std::pair<std::vector<int64_t>, std::vector<int64_t>>;
  EXPECT_EQ(gathered({0, 1}, 0), Got({60, 0}, {240, 0}));
  EXPECT_EQ(gathered({0, 1}, 1), Got({30, 30}, {120, 120}));
  EXPECT_EQ(gathered({0, 0}, 0), Got({60, 30}, {360})) << "both stages are the owner's";
}

TEST(GatheredBytes, AreOfTheTwoLargestThatFit) {
  auto b = layers_of({10, 90, 60, 20, 70, 80, 50, 40});
  const auto& graph = b.graph();
  // Rank 0 has 10, 90, 60 and 50, 40; rank 1 has 20, 70, 80.
  const Plan plan = plan_of(b, {9, 9}, {0, 1, 0});
  const auto gathered = [&](int64_t live) {
    // Units of one.
    const Units units = find_units(graph, plan, {}, sharding().live(1));
    return gathered_bytes(graph, plan, units, sharding().live(live));
  };
  EXPECT_THAT(gathered(200), ElementsAre(4 * 150, 4 * 150));
  EXPECT_THAT(gathered(140), ElementsAre(4 * 140, 4 * 140)) << "as much as is allowed of two";
  EXPECT_THAT(gathered(1), ElementsAre(4 * 90, 4 * 80));
}

}  // namespace
}  // namespace smp::partitioner::testing
