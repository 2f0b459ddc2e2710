// SPDX-License-Identifier: Apache-2.0
// The consequences of a plan's stages: transfers, owners, replicas, and where gradients go.

#include "partitioner/complete.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>

#include "core/check.h"
#include "partitioner/cuts.h"
#include "partitioner/partition.h"
#include "tests/error_of.h"
#include "tests/partitioner/chain.h"
#include "tests/partitioner/random_graph.h"

namespace smp::partitioner::testing {
namespace {

using graph::Graph;
using smp::testing::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// skip = op 0; then four operators, of which those in `users` add the skip again.
GraphBuilder skip_graph(const std::vector<int>& users, Ref& skip) {
  GraphBuilder b;
  const Ref w = b.parameter("w", ones(2, 2));
  skip = b.op("aten::mul.Tensor", {b.input(ones(2, 2)), w});
  b.cost(10);
  Ref x = skip;
  for (int i = 1; i < 4; ++i) {
    const bool user = std::find(users.begin(), users.end(), i) != users.end();
    x = b.op("aten::add.Tensor", {x, user ? skip : x, 1});
    b.cost(10);
  }
  b.backward(x);
  b.output(x);
  return b;
}

std::vector<Transfer> transfers_of(const Plan& plan, Ref value) {
  std::vector<Transfer> result;
  for (const Transfer& transfer : plan.transfers) {
    if (transfer.value == value.id) result.push_back(transfer);
  }
  return result;
}

TEST(Transfers, ASkipTravelsAlongTheStagesThatUseIt) {
  Ref skip;
  GraphBuilder b = skip_graph({3}, skip);
  const PartitionOptions four = PartitionOptions(4).memory_weight(0);
  EXPECT_THAT(transfers_of(partition(b.graph(), four), skip),
              ElementsAre(Transfer{skip.id, 0, 1, true}, Transfer{skip.id, 1, 3, true}))
      << "stage 2 does not see it";
  b = skip_graph({2, 3}, skip);
  EXPECT_THAT(transfers_of(partition(b.graph(), four), skip),
              ElementsAre(Transfer{skip.id, 0, 1, true}, Transfer{skip.id, 1, 2, true},
                          Transfer{skip.id, 2, 3, true}));
  const Plan three = partition(b.graph(), PartitionOptions(3).memory_weight(0));
  EXPECT_THAT(three.stage_of_operator, ElementsAre(0, 1, 2, 2))
      << "(0, 0, 1, 2) sends four tensors instead of three";
  EXPECT_THAT(transfers_of(three, skip),
              ElementsAre(Transfer{skip.id, 0, 1, true}, Transfer{skip.id, 1, 2, true}));
}

TEST(Transfers, AGradientComesBackOnlyFromWhereOneIs) {
  GraphBuilder b;
  const Ref x = b.op("aten::mul.Tensor", {b.input(ones(2, 2)), b.parameter("w", ones(2, 2))});
  const Ref detached = b.op("aten::detach", {x});
  const Ref loss = b.op("aten::sum", {x, c10::IValue()});
  b.grad_mode = false;
  const Ref metric = b.op("aten::add.Tensor", {x, detached, 1});
  b.backward(loss);
  b.output(metric);
  const Plan plan = complete_plan(b.graph(), {0, 1, 2}, {0, 0, 1, 2}, {});
  EXPECT_THAT(plan.transfers, ElementsAre(Transfer{x.id, 0, 1, true}, Transfer{x.id, 1, 2, false},
                                          Transfer{detached.id, 0, 2, false}));
}

TEST(Transfers, AValueWrittenThroughAViewRequiresGradFromThenOn) {
  GraphBuilder b;
  const Ref w = b.parameter("w", ones(1, 2));
  const Ref out = b.op("aten::relu", {b.input(ones(2, 2))});  // stage 0: no grad yet
  const Ref row = b.op("aten::slice.Tensor", {out, 0, 0, 1, 1});
  b.op("aten::copy_", {row, w, false});  // `out` requires grad from here
  const Ref loss = b.op("aten::sum", {out, c10::IValue()});
  b.backward(loss);
  b.output(loss);
  EXPECT_FALSE(b.graph().values[out.id].meta.requires_grad);
  EXPECT_THAT(complete_plan(b.graph(), {0, 1}, {0, 1, 1, 1}, {}).transfers,
              ElementsAre(Transfer{out.id, 0, 1, false}));
  const Plan late = complete_plan(b.graph(), {0, 1}, {0, 0, 0, 1}, {});
  EXPECT_THAT(late.transfers, ElementsAre(Transfer{out.id, 0, 1, true}));
  const Plan chain = complete_plan(b.graph(), {0, 1, 2}, {0, 1, 1, 2}, {});
  EXPECT_THAT(chain.transfers,
              ElementsAre(Transfer{out.id, 0, 1, false}, Transfer{out.id, 1, 2, true}));
}

TEST(Transfers, ARootIsBroughtToItsGradient) {
  GraphBuilder b;
  const Ref y = b.op("aten::mul.Tensor", {b.input(ones(2, 2)), b.parameter("w", ones(2, 2))});
  const Ref gradient = b.op("aten::ones_like", {y, c10::IValue(), c10::IValue(), c10::IValue(),
                                                c10::IValue(), c10::IValue()});
  b.backward(y, gradient);
  b.output(y);
  const Plan plan = partition(b.graph(), PartitionOptions(2));
  EXPECT_THAT(plan.stage_of_root, ElementsAre(1));
  EXPECT_THAT(plan.stage_of_output, ElementsAre(0));
  EXPECT_THAT(plan.transfers, ElementsAre(Transfer{y.id, 0, 1, true}));
}

TEST(Owners, ATiedWeightHasOneOwnerAndItsGradientReturnsStageByStage) {
  GraphBuilder b;
  const Ref tied = b.parameter("embed.weight", ones(2, 2));
  Ref x = b.input(ones(2, 2));
  for (int i = 0; i < 4; ++i) {
    b.grad_mode = i != 1;
    const Ref y = b.op("aten::matmul", {x, tied});
    b.cost(10);
    b.grad_mode = true;
    x = i == 1 ? b.op("aten::add.Tensor", {x, y, 1}) : y;
  }
  b.backward(x);
  b.output(x);
  const Plan plan = complete_plan(b.graph(), {0, 1, 2, 3}, {0, 1, 1, 2, 3}, {});
  EXPECT_EQ(plan.owner, (Owners{{"embed.weight", 0}}));
  EXPECT_THAT(plan.replicas,
              ElementsAre(Replica{tied.id, 0, 1, 0, false}, Replica{tied.id, 0, 2, 0, true},
                          Replica{tied.id, 0, 3, 2, true}))
      << "stage 1 reads it without a gradient, so it has none to pass on";
}

TEST(Owners, AWrittenBufferBelongsToTheStageThatWritesIt) {
  GraphBuilder b;
  const Ref count = b.buffer("bn.count", at::ones({2, 2}));
  Ref x = b.op("aten::mul.Tensor", {b.input(ones(2, 2)), b.parameter("w", ones(2, 2))});
  b.cost(10);
  b.op("aten::add_.Scalar", {count, 1, 1});
  x = b.op("aten::add.Tensor", {x, count, 1});
  b.cost(10);
  b.backward(x);
  b.output(x);
  const Plan plan = partition(b.graph(), PartitionOptions(2).memory_weight(0));
  EXPECT_THAT(plan.stage_of_operator, ElementsAre(0, 1, 1));
  EXPECT_EQ(plan.owner.at("bn.count"), 1);
  EXPECT_TRUE(plan.replicas.empty());
  EXPECT_THAT(plan.reason_of_operator[2], HasSubstr("cut 1|2 illegal: buffer \"bn.count\" is "
                                                    "written by operator 1 (aten::add_.Scalar)"));
  EXPECT_THAT(error_of<PartitionError>([&] {
                partition(b.graph(), PartitionOptions(2).owner(Owners{{"bn.count", 0}}));
              }),
              HasSubstr("buffer \"bn.count\" belongs to partition 0, where operator 1 "
                        "(aten::add_.Scalar) must run, with too few operators after it for the 1 "
                        "later partition"));
}

TEST(Owners, SettledOwnersMoveTheCuts) {
  Chain chain(4);
  const Owners late{{"fc0.weight", 0}, {"fc1.weight", 1}};
  const Plan plan = partition(chain.b.graph(), PartitionOptions(2).owner(late));
  EXPECT_THAT(plan.stage_of_operator, ElementsAre(0, 0, 1, 1, 1, 1, 1, 1, 1));
  EXPECT_EQ(plan.reason_of_operator[2], "owner of fc1.weight");
  const Plan again =
      partition(chain.b.graph(), PartitionOptions(2).owner(plan.owner).memory_weight(0));
  EXPECT_EQ(again.stage_of_operator, plan.stage_of_operator);
}

TEST(Owners, EvaluationFollowsTheOwnersWhateverTheBalance) {
  Chain training(6), evaluation(6);
  evaluation.b.graph().roots.clear();
  const Plan plan = partition(training.b.graph(), PartitionOptions(3));
  graph::Graph& graph = evaluation.b.graph();
  graph.operators[1].cost.forward_us = 1000;  // on balance alone the first cut would come earlier
  const Plan free = partition(graph, PartitionOptions(3));
  const Plan bound = partition(graph, PartitionOptions(3).owner(plan.owner));
  EXPECT_NE(free.stage_of_operator, plan.stage_of_operator);
  EXPECT_TRUE(bound.replicas.empty());
  EXPECT_EQ(bound.owner, plan.owner);
}

TEST(Owners, EvaluationInAnotherOrderMakesReplicas) {
  Chain chain(2);
  chain.b.graph().roots.clear();
  const Owners swapped{{"fc0.weight", 1}, {"fc1.weight", 0}};
  const Plan plan = partition(chain.b.graph(), PartitionOptions(2).owner(swapped));
  EXPECT_EQ(plan.owner, swapped);
  EXPECT_EQ(plan.replicas.size(), 1u) << "one stage runs both layers and has a replica of one";
}

TEST(Owners, InAnotherOrderRanksRunTheirStagesInThatOrder) {
  Chain chain(3);
  const Owners swapped{{"fc0.weight", 1}, {"fc2.weight", 0}};
  const Plan plan = partition(chain.b.graph(), PartitionOptions(2).owner(swapped));
  EXPECT_THAT(plan.rank_of_stage, ElementsAre(1, 0));
  EXPECT_EQ(plan.rank_of_stage[plan.owner.at("fc0.weight")], 1);
  EXPECT_EQ(plan.rank_of_stage[plan.owner.at("fc2.weight")], 0);
}

// ---- Gradients against autograd --------------------------------------------------------------

TEST(Gradients, ComeBackWhereAutogradGivesOne) {
  int with = 0, without = 0;
  for (unsigned seed = 0; seed < 1500; ++seed) {
    RandomProgram program(seed, /*train=*/true);
    const Graph& graph = program.graph();
    if (graph.roots.empty()) continue;
    const std::vector<bool> legal = legal_cuts(graph);
    for (size_t i = 0; i < legal.size(); ++i) {
      if (!legal[i]) continue;
      std::vector<int> stages(graph.operators.size(), 0);
      std::fill(stages.begin() + static_cast<long>(i) + 1, stages.end(), 1);
      const Plan plan = complete_plan(graph, {0, 1}, stages, {});
      const StagedRun run(graph, plan, program.initial());
      run.tensor(plan.stage_of_root[0], graph.roots[0].value).backward();
      for (const Transfer& transfer : plan.transfers) {
        const bool expected = run.entry(1, transfer.value).grad().defined();
        (expected ? with : without) += 1;
        ASSERT_EQ(transfer.needs_gradient, expected)
            << "seed " << seed << " cut " << i << " value " << transfer.value << "\n"
            << graph.to_string();
      }
    }
  }
  std::cout << with << " transfers with a gradient, " << without << " without\n";
  EXPECT_GT(with, 300);
  EXPECT_GT(without, 300);
}

}  // namespace
}  // namespace smp::partitioner::testing
