// SPDX-License-Identifier: Apache-2.0
// The candidates of activation checkpointing, their costs, and the choice among them.

#include "partitioner/checkpointing.h"

#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/check.h"
#include "partitioner/complete.h"
#include "tests/partitioner/graph_builder.h"

namespace smp::partitioner {
namespace {

using testing::GraphBuilder;
using testing::Ref;

constexpr int64_t kWidth = 4, kRows = 8;
constexpr int64_t kBytes = kWidth * kRows * 4;  // bytes of each activation

/// "blocks.0", "blocks.1" ...: a layer each, and tanh, which has no parameters; then a loss.
/// Operators: t, addmm and tanh of each block, sum.
graph::Graph chain(int blocks) {
  GraphBuilder builder;
  Ref x = builder.input(at::randn({kRows, kWidth}));
  for (int i = 0; i < blocks; ++i) {
    const std::string name = "blocks." + std::to_string(i);
    const Ref weight = builder.parameter(name + ".weight", at::randn({kWidth, kWidth}));
    const Ref bias = builder.parameter(name + ".bias", at::randn({kWidth}));
    x = builder.linear(name, x, weight, bias);
    builder.cost(10 + i, 20, kBytes);
    auto& operators = builder.graph().operators;
    operators.back().reads_parameter = operators[operators.size() - 2].reads_parameter = true;
    builder.scope = "blocks";
    x = builder.op("aten::tanh", {x});
    builder.cost(1, 2, kBytes);
  }
  builder.scope = "";
  const Ref loss = builder.op("aten::sum", {x, c10::IValue()});
  builder.cost(1, 1, 4);
  builder.backward(loss);
  return builder.graph();
}

std::vector<std::string> paths(int blocks) {
  std::vector<std::string> result;
  for (int i = 0; i < blocks; ++i) result.push_back("blocks." + std::to_string(i));
  return result;
}

TEST(ModuleRegions, OfEachModuleGoOnToTheNextOne) {
  const graph::Graph graph = chain(3);
  // tanh of the last block comes after the last parameter, so it is taken for the loss.
  EXPECT_EQ(find_module_regions(graph, {{paths(3), 1}}), Regions({0, 0, 0, 1, 1, 1, 2, 2, -1, -1}));
  EXPECT_EQ(find_module_regions(graph, {{{"blocks.1"}, 1}}),
            Regions({-1, -1, -1, 0, 0, 0, -1, -1, -1, -1}));
  EXPECT_EQ(find_module_regions(graph, {{{"blocks"}, 1}}),
            Regions({0, 0, 0, 0, 0, 0, 0, 0, -1, -1}));
  EXPECT_EQ(find_module_regions(graph, {{{""}, 1}}), Regions({0, 0, 0, 0, 0, 0, 0, 0, -1, -1}));
  EXPECT_TRUE(find_module_regions(graph, {{{"block"}, 1}}).empty());
  EXPECT_TRUE(find_module_regions(graph, {}).empty());
}

TEST(ModuleRegions, OfModulesInsideEachOtherTheOutermostCounts) {
  const graph::Graph graph = chain(3);
  const Regions all = {0, 0, 0, 0, 0, 0, 0, 0, -1, -1};
  EXPECT_EQ(find_module_regions(graph, {{{"blocks"}, 1}, {{"blocks.1"}, 1}}), all);
  EXPECT_EQ(find_module_regions(graph, {{{"blocks.1"}, 1}, {{"blocks"}, 1}}), all);
}

TEST(ModuleRegions, GroupsStartAnewOnEachStage) {
  const graph::Graph graph = chain(5);
  const auto regions = [&](int group, const std::vector<int>& stages) {
    const Regions all = find_module_regions(graph, {{paths(5), group}}, stages);
    Regions of_blocks;
    for (size_t block = 0; block < 5; ++block) of_blocks.push_back(all[3 * block]);
    return of_blocks;
  };
  EXPECT_EQ(regions(2, {}), Regions({0, 0, 1, 1, 2}));
  EXPECT_EQ(regions(0, {}), Regions({0, 0, 0, 0, 0}));
  // The documented case: [a, b | c, d, e] with group_3 gives (a, b), (c, d, e).
  std::vector<int> stages(graph.operators.size(), 1);
  std::fill_n(stages.begin(), 6, 0);
  EXPECT_EQ(regions(3, stages), Regions({0, 0, 1, 1, 1}));
  EXPECT_EQ(regions(0, stages), Regions({0, 0, 1, 1, 1}));
  // A stage may end inside a module.
  std::vector<int> inside(graph.operators.size(), 1);
  std::fill_n(inside.begin(), 2, 0);
  EXPECT_EQ(find_module_regions(graph, {{{"blocks.0"}, 1}}, inside),
            Regions({0, 0, 1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}));
}

TEST(RegionCosts, AreInputsAndASecondForward) {
  const graph::Graph graph = chain(3);
  const Regions regions = find_module_regions(graph, {{{"blocks.0", "blocks.1"}, 1}});
  const graph::Graph costed = with_regions(graph, regions);
  const auto& before = graph.operators;
  const auto& after = costed.operators;
  // The first block reads the step's input, which is there anyway; the second one the result of
  // tanh.
  EXPECT_EQ(after[1].cost.saved_bytes, 0);
  EXPECT_EQ(after[2].cost.saved_bytes, kBytes);
  EXPECT_EQ(after[4].cost.saved_bytes, 0);
  EXPECT_EQ(after[5].cost.saved_bytes, 0);
  for (size_t i : {6, 7, 8, 9}) {
    EXPECT_EQ(after[i].cost.saved_bytes, before[i].cost.saved_bytes) << i;
    EXPECT_EQ(after[i].cost.backward_us, before[i].cost.backward_us) << i;
  }
  for (size_t i : {0, 1, 2, 3, 4, 5}) {
    EXPECT_EQ(after[i].cost.backward_us, before[i].cost.backward_us + before[i].cost.forward_us);
    EXPECT_EQ(after[i].cost.forward_us, before[i].cost.forward_us);
  }
  EXPECT_EQ(largest_region_bytes(graph, regions), 2 * kBytes);
  EXPECT_EQ(largest_region_bytes(graph, find_module_regions(graph, {{{"blocks"}, 1}})), 5 * kBytes);
  // Inputs from another stage are counted there, among those that it receives.
  std::vector<int> stages(graph.operators.size(), 1);
  std::fill_n(stages.begin(), 3, 0);
  const Regions divided = find_module_regions(graph, {{{"blocks.0", "blocks.1"}, 1}}, stages);
  EXPECT_EQ(with_regions(graph, divided, stages).operators[2].cost.saved_bytes, 0);
}

TEST(CandidateModules, AreChildrenOfContainersOrModules) {
  graph::Graph graph = chain(3);
  EXPECT_EQ(candidate_modules(graph), paths(3));
  graph.operators[0].scope = graph.operators[1].scope = "encoder.layers.0.attention.out";
  graph.operators[3].scope = graph.operators[4].scope = "head.dense";
  EXPECT_EQ(candidate_modules(graph),
            std::vector<std::string>({"encoder.layers.0", "head.dense", "blocks.2"}));
}

Plan one_stage(const graph::Graph& graph) {
  return complete_plan(graph, {0}, std::vector<int>(graph.operators.size(), 0), {});
}

TEST(ChooseModules, TakesTheCheapestThatFreeMostUntilItFits) {
  const graph::Graph graph = chain(6);
  const Plan plan = one_stage(graph);
  const StepModel step = StepModel(10).interleaved(false).optimizer_state(0);
  const auto memory = [&](const std::vector<CheckpointedModules>& modules) {
    return predict_with(graph, plan, step, modules).rank_memory[0];
  };
  const int64_t plain = memory({});
  EXPECT_TRUE(choose_modules(graph, plan, step, plain, {})->empty());
  // Block 0 keeps nothing at all, others their input. The first of these run faster.
  const auto chosen = choose_modules(graph, plan, step, plain - 1, {});
  ASSERT_TRUE(chosen.has_value());
  ASSERT_EQ(chosen->size(), 1u);
  EXPECT_EQ(chosen->front().modules, std::vector<std::string>({"blocks.0"}));
  std::vector<CheckpointedModules> all;
  for (const auto& path : paths(6)) all.push_back({{path}, 1});
  size_t before = 1;
  for (int64_t limit = plain - 2; limit >= memory(all); limit -= kBytes) {
    const auto modules = choose_modules(graph, plan, step, limit, {});
    ASSERT_TRUE(modules.has_value()) << limit;
    EXPECT_LE(memory(*modules), limit);
    auto fewer = *modules;
    fewer.pop_back();
    EXPECT_GT(memory(fewer), limit) << "the last one was not needed";
    EXPECT_GE(modules->size(), before);
    before = modules->size();
  }
  EXPECT_GT(before, 3u);
  EXPECT_FALSE(choose_modules(graph, plan, step, 1, {}).has_value());
}

TEST(CheckRepeatable, NamesTheModuleAndTheReason) {
  GraphBuilder builder;
  const Ref x = builder.input(at::randn({kRows, kWidth}));
  const Ref weight = builder.parameter("net.weight", at::randn({kWidth}));
  const Ref y = builder.op("aten::mul.Tensor", {x, weight});
  const Ref left = builder.op("aten::narrow", {y, 1, 0, 2});
  const Ref right = builder.op("aten::narrow", {y, 1, 1, 2});
  builder.scope = "net";
  builder.op("aten::mul_.Tensor", {left, right});
  const Ref loss = builder.op("aten::sum", {left, c10::IValue()});
  builder.backward(loss);
  try {
    check_repeatable(builder.graph(), {-1, -1, -1, 0, 0});
    ADD_FAILURE() << "no error";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    for (const char* part :
         {"activation checkpointing: operators 3 to 4, in module \"net\", cannot run again",
          "operator 3 (aten::mul_.Tensor) writes in place a tensor of which 2 views",
          "Leave the module out"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

}  // namespace
}  // namespace smp::partitioner
