// SPDX-License-Identifier: Apache-2.0
// Copies, which ranks give each other at the beginning of a step, and outputs, at its end.
#include "pipeline/copies.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "comm/threads/run_ranks.h"
#include "pipeline/outputs.h"

namespace smp::pipeline {
namespace {

graph::Value value_of(const std::string& name, graph::ValueKind kind, const at::Tensor& tensor) {
  graph::Value value;
  value.kind = kind;
  value.name = name;
  value.meta = graph::TensorMeta::of(tensor);
  return value;
}

partitioner::Plan plan_of(std::vector<int> rank_of_stage) {
  partitioner::Plan plan;
  plan.rank_of_stage = std::move(rank_of_stage);
  return plan;
}

/// Value, owner and reader.
partitioner::Replica replica_of(graph::ValueId value, int owner, int stage) {
  partitioner::Replica replica;
  replica.value = value;
  replica.owner = owner;
  replica.stage = stage;
  return replica;
}

TEST(Copies, AreOneForEachRankThatReads) {
  partitioner::Plan plan = plan_of({0, 1, 0, 1});
  plan.replicas = {replica_of(7, 0, 1), replica_of(7, 0, 2), replica_of(7, 0, 3),
                   replica_of(8, 3, 0), replica_of(9, 0, 1), replica_of(9, 0, 3)};
  const std::vector<Frame::Copy> copies = copies_of(plan);
  ASSERT_EQ(copies.size(), 2U);
  EXPECT_EQ(copies[0].from, 0);
  EXPECT_EQ(copies[0].to, 1);
  EXPECT_EQ(copies[0].values, (std::vector<graph::ValueId>{7, 9})) << "stage 3 shares them";
  EXPECT_EQ(copies[1].from, 3);
  EXPECT_EQ(copies[1].to, 0);
  EXPECT_EQ(copies[1].values, (std::vector<graph::ValueId>{8}));
}

/// A parameter that lies in columns, and two buffers of which one is unwritten.
TEST(Copies, AreMadeAnewButOfUnwrittenBuffers) {
  graph::Graph graph;
  graph.values = {value_of("weight", graph::ValueKind::kParameter, at::zeros({2, 3})),
                  value_of("mask", graph::ValueKind::kBuffer, at::zeros({2})),
                  value_of("count", graph::ValueKind::kBuffer, at::zeros({1}))};
  comm::run_ranks(2, [&](const comm::CommunicatorPtr& world) {
    const bool owns = world->rank() == 0;
    const at::Tensor weight = owns ? at::arange(6, at::kFloat).view({3, 2}).t()
                                   : at::zeros({2, 3}).set_requires_grad(true);
    const at::Tensor mask = at::full({2}, owns ? 5 : 1), count = at::full({1}, owns ? 4 : 0);
    graph::TensorTable table;
    table.add(graph::ValueKind::kParameter, "weight", weight);
    table.add(graph::ValueKind::kBuffer, "mask", mask);
    table.add(graph::ValueKind::kBuffer, "count", count);
    const CopiedTensors copies({0, 1, {0, 1, 2}}, graph, table, nullptr, {});
    const CopiedTensors::Unwritten unwritten = {1};
    EXPECT_EQ(copies.nbytes({}), 6 * 4 + 2 * 8 + 8);
    EXPECT_EQ(copies.nbytes(unwritten), 6 * 4 + 8);
    if (owns) {
      copies.send(*world, 1, unwritten);
      return;
    }
    copies.receive(*world, 0, unwritten);
    EXPECT_TRUE(weight.equal(at::arange(6, at::kFloat).view({3, 2}).t()));
    EXPECT_TRUE(weight.is_leaf()) << "without a history";
    EXPECT_TRUE(mask.equal(at::full({2}, 1))) << "left as it is";
    EXPECT_TRUE(count.equal(at::full({1}, 4)));
  });
}

/// Outputs of three stages on two ranks: a number, four numbers, a number.
class OutputsTest : public ::testing::Test {
 protected:
  OutputsTest() {
    for (const int64_t elements : {1, 4, 1}) {
      graph_.outputs.push_back(static_cast<graph::ValueId>(graph_.values.size()));
      graph_.values.push_back(value_of("", graph::ValueKind::kResult, at::zeros({elements})));
    }
    graph_.outputs.push_back(graph::kUndefined);
    plan_.stage_of_output = {2, 1, 0, 0};
  }

  static at::Tensor value(int position, int microbatch) {
    return at::full({position == 1 ? 4 : 1}, 10. * position + microbatch, at::kFloat);
  }

  /// Positions and microbatches on both ranks after the step, as "0.1 ", in ascending order.
  std::vector<std::string> shared(bool all) {
    std::vector<std::string> texts(2);
    comm::run_ranks(2, [&](const comm::CommunicatorPtr& world) {
      StepResults results;
      for (int m = 1; m >= 0; --m) {
        for (const int position : {2, 1, 0}) {
          if (plan_.rank_of_stage[plan_.stage_of_output[position]] != world->rank()) continue;
          results.outputs.push_back({position, m, value(position, m)});
        }
      }
      for (const auto& [stage, outputs] : shared_outputs(graph_, plan_, 2, 2, all)) {
        outputs.share(*world, plan_.rank_of_stage[stage], results);
      }
      std::set<std::string> places;
      for (const auto& output : results.outputs) {
        EXPECT_TRUE(output.value.equal(value(output.position, output.microbatch)));
        const bool is_new =
            places.insert(std::to_string(output.position) + "." + std::to_string(output.microbatch))
                .second;
        EXPECT_TRUE(is_new) << output.position << " twice";
      }
      for (const std::string& place : places) texts[world->rank()] += place + " ";
    });
    return texts;
  }

  graph::Graph graph_;
  partitioner::Plan plan_ = plan_of({0, 1, 0});
};

TEST_F(OutputsTest, GoToAllRanks) {
  const std::string all = "0.0 0.1 1.0 1.1 2.0 2.1 ";
  EXPECT_EQ(shared(/*all=*/true), (std::vector<std::string>{all, all}));
}

TEST_F(OutputsTest, OrOnlyThoseOfOneElement) {
  EXPECT_EQ(shared(/*all=*/false),
            (std::vector<std::string>{"0.0 0.1 2.0 2.1 ", "0.0 0.1 1.0 1.1 2.0 2.1 "}));
}

TEST_F(OutputsTest, AreOneMessageOfEachStage) {
  const auto stages_of = [&](int ranks, bool all) {
    std::vector<int> stages;
    for (const auto& [stage, outputs] : shared_outputs(graph_, plan_, ranks, 2, all)) {
      stages.push_back(stage);
    }
    return stages;
  };
  EXPECT_EQ(stages_of(2, /*all=*/true), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(stages_of(2, /*all=*/false), (std::vector<int>{0, 2}));
  EXPECT_TRUE(stages_of(/*ranks=*/1, true).empty());
}

}  // namespace
}  // namespace smp::pipeline
