// SPDX-License-Identifier: Apache-2.0
#include "partitioner/pins.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "partitioner/partition.h"
#include "tests/error_of.h"
#include "tests/partitioner/chain.h"

namespace smp::partitioner::testing {
namespace {

using smp::testing::error_of;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;

/// Layers "fc0" to "fc<n-1>", each t, matmul and a relu; then a mean. Operator 3 i is the first of
/// layer i.
struct Layers {
  GraphBuilder b;

  explicit Layers(int count) {
    Ref x = b.input(ones(2, 4));
    for (int i = 0; i < count; ++i) {
      b.scope = "fc" + std::to_string(i);
      const Ref weight = b.parameter(b.scope + ".weight", ones(4, 4));
      x = b.op("aten::matmul", {x, b.op("aten::t", {weight})});
      b.cost(1000, 2000);
      b.scope = "";
      x = b.op("aten::relu", {x});
      b.cost(100, 100);
    }
    x = b.op("aten::mean", {x, c10::IValue()});
    b.backward(x);
    b.output(x);
  }

  void scope(int operator_index, int partition) {
    b.graph().operators[operator_index].mode.partition = partition;
  }

  std::string error(const PartitionOptions& options) {
    return error_of<PartitionError>([&] { partition(b.graph(), options); });
  }
};

std::vector<int> ranks_of(const Plan& plan) {
  std::vector<int> ranks;
  for (int stage : plan.stage_of_operator) ranks.push_back(plan.rank_of_stage[stage]);
  return ranks;
}

PartitionOptions manual(int partitions) {
  return PartitionOptions(partitions).auto_partition(false);
}

// ---- The list of stages ----------------------------------------------------------------------

std::vector<int> list(const std::vector<int>& pinned, int ranks) {
  std::vector<Pin> pins;
  for (int rank : pinned) pins.push_back({static_cast<int>(pins.size()), rank});
  return list_stages(pins, ranks);
}

TEST(ListStages, RanksAscendWhereThePinsAllowIt) {
  EXPECT_THAT(list({}, 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(list({1, 1}, 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(list({0, 2, 2}, 4), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(list({0, 1, 1, 0}, 2), ElementsAre(0, 1, 0));
  EXPECT_THAT(list({0, 3, 0}, 4), ElementsAre(0, 1, 2, 3, 0));
  EXPECT_THAT(list({0, 1, 0}, 3), ElementsAre(0, 1, 0, 2));
  EXPECT_THAT(list({1, 0}, 2), ElementsAre(1, 0));
}

TEST(ListStages, TellsTheStageOfEveryPin) {
  std::vector<Pin> pins{{0, 2}, {1, 2}, {2, 0}};
  EXPECT_THAT(list_stages(pins, 3), ElementsAre(1, 2, 0));
  EXPECT_THAT(pins,
              ElementsAre(Field(&Pin::stage, 1), Field(&Pin::stage, 1), Field(&Pin::stage, 2)));
}

// ---- Automatic, with pins --------------------------------------------------------------------

TEST(Pins, TheRestIsBalancedAroundThem) {
  Layers model(4);
  const auto options = PartitionOptions(2).memory_weight(0).step(StepModel(8));
  EXPECT_THAT(ranks_of(partition(model.b.graph(), options)),
              ElementsAre(0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1));
  const Plan plan =
      partition(model.b.graph(), PartitionOptions(options).pinned(Owners{{"fc2.weight", 0}}));
  EXPECT_THAT(ranks_of(plan), ElementsAre(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1));
  EXPECT_EQ(plan.rank_of_stage[plan.owner.at("fc2.weight")], 0);
  EXPECT_EQ(plan.reason_of_operator[6], "parameter fc2.weight is pinned to partition 0");
  EXPECT_EQ(plan.reason_of_operator[7], "parameter fc2.weight is pinned to partition 0")
      << "it reads the weight through a view";
}

TEST(Pins, AScopeInForwardPinsWhatRunsInIt) {
  Layers model(3);
  model.scope(2, 1);
  const Plan plan = partition(model.b.graph(), PartitionOptions(2));
  EXPECT_THAT(ranks_of(plan), ElementsAre(0, 0, 1, 1, 1, 1, 1, 1, 1, 1));
  EXPECT_EQ(plan.reason_of_operator[2], "smp::partition(1) scope");
}

TEST(Pins, BackToAnEarlierPartitionMakesAStageOfItsOwn) {
  Layers model(3);
  const auto options =
      PartitionOptions(2).pinned(Owners{{"fc0.weight", 0}, {"fc1.weight", 1}, {"fc2.weight", 0}});
  const Plan plan = partition(model.b.graph(), options);
  EXPECT_THAT(plan.rank_of_stage, ElementsAre(0, 1, 0));
  EXPECT_EQ(plan.rank_of_stage[plan.owner.at("fc1.weight")], 1);
  EXPECT_EQ(plan.rank_of_stage[plan.owner.at("fc2.weight")], 0);
  for (const int first : {0, 3, 6}) {
    EXPECT_EQ(ranks_of(plan)[first], first == 3 ? 1 : 0);
    EXPECT_EQ(ranks_of(plan)[first + 1], first == 3 ? 1 : 0);
  }
}

TEST(Pins, ALaterReadUnderAScopeIsAReplica) {
  GraphBuilder b;
  const Ref weight = b.parameter("tied", ones(4, 4));
  Ref x = b.op("aten::matmul", {b.input(ones(2, 4)), weight});
  x = b.op("aten::matmul", {x, weight});
  b.backward(x);
  b.output(x);
  b.graph().operators[1].mode.partition = 1;
  const Plan plan = partition(b.graph(), manual(2).pinned(Owners{{"tied", 0}}));
  EXPECT_THAT(ranks_of(plan), ElementsAre(0, 1));
  EXPECT_THAT(plan.replicas, ElementsAre(Replica{weight.id, 0, 1, 0, true}));
}

// ---- Manual ----------------------------------------------------------------------------------

TEST(Manual, WhatNothingPinsGoesToTheDefaultOrFollows) {
  Layers model(3);
  const Plan plan = partition(model.b.graph(), manual(3).default_partition(2).pinned(
                                                   Owners{{"fc0.weight", 0}, {"fc1.weight", 1}}));
  EXPECT_THAT(ranks_of(plan), ElementsAre(0, 0, 0, 1, 1, 1, 2, 2, 2, 2));
  EXPECT_EQ(plan.reason_of_operator[2], "follows operator 1");
  EXPECT_EQ(plan.reason_of_operator[6], "fc2.weight is not pinned: default partition");
  EXPECT_EQ(plan.reason_of_operator[9], "follows operator 8");
}

TEST(Manual, WithoutPinsAllIsOnTheDefaultPartition) {
  Layers model(2);
  const Plan plan = partition(model.b.graph(), manual(2).default_partition(1));
  EXPECT_THAT(ranks_of(plan), ElementsAre(1, 1, 1, 1, 1, 1, 1));
  EXPECT_EQ(plan.rank_of_stage[plan.owner.at("fc0.weight")], 1);
}

TEST(Manual, ALaterStepFunctionFollowsTheOwners) {
  Layers model(2);
  model.b.graph().roots.clear();
  const Plan plan =
      partition(model.b.graph(), manual(2).owner(Owners{{"fc0.weight", 1}, {"fc1.weight", 0}}));
  EXPECT_THAT(ranks_of(plan), ElementsAre(1, 1, 1, 0, 0, 0, 0));
  EXPECT_TRUE(plan.replicas.empty());
}

TEST(Manual, WhatComesFirstGoesToTheDefault) {
  GraphBuilder b;
  const Ref x = b.op("aten::relu", {b.input(ones(2, 4))});
  const Ref y = b.op("aten::matmul", {x, b.parameter("w", ones(4, 4))});
  b.backward(y);
  b.output(y);
  const Plan plan = partition(b.graph(), manual(2).pinned(Owners{{"w", 1}}));
  EXPECT_THAT(ranks_of(plan), ElementsAre(0, 1));
  EXPECT_THAT(plan.reason_of_operator, ElementsAre("comes before all pins: default partition",
                                                   "parameter w is pinned to partition 1"));
}

TEST(Manual, APinWithoutATensorIsDescribedWithoutOne) {
  Layers model(1);
  const Pin pin{2, 1, PinSource::kDefault, graph::kUndefined};
  EXPECT_EQ(reason(model.b.graph(), pin), "comes before all pins: default partition");
  EXPECT_EQ(describe(model.b.graph(), pin),
            "operator 2 (aten::relu) comes before all pins, so it runs on the default partition 1");
}

TEST(Manual, TheCutBeforeAPinMovesToALegalPlace) {
  GraphBuilder b;
  const Ref w = b.parameter("w", ones(4, 4)), v = b.parameter("v", ones(4, 4));
  Ref x = b.op("aten::matmul", {b.input(ones(2, 4)), w});                   // 0
  x = b.op("aten::sin", {x});                                               // 1
  const Ref y = b.op("aten::cos", {x});                                     // 2
  const Ref row = b.op("aten::select.int", {y, 0, 0});                      // 3
  b.op("aten::mul_.Tensor", {row, b.op("aten::sum", {v, c10::IValue()})});  // 4 reads v, 5 writes
  const Ref loss = b.op("aten::sum", {y, c10::IValue()});
  b.backward(loss);
  b.output(loss);
  const Plan plan = partition(b.graph(), manual(2).pinned(Owners{{"w", 0}, {"v", 1}}));
  EXPECT_THAT(ranks_of(plan), ElementsAre(0, 0, 0, 1, 1, 1, 1))
      << "from operator 3 on, y and its row must see the same write";
}

// ---- Errors ----------------------------------------------------------------------------------

TEST(PinErrors, NoSuchPartition) {
  Layers model(2);
  EXPECT_EQ(model.error(PartitionOptions(2).pinned(Owners{{"fc1.weight", 2}})),
            "[smp] cannot partition: parameter \"fc1.weight\" is pinned to partition 2, where "
            "operator 3 (aten::t) must run, but the partitions are 0 to 1. Pin it to one of them, "
            "or ask for more partitions.");
  model.scope(2, 7);
  EXPECT_EQ(model.error(PartitionOptions(2)),
            "[smp] cannot partition: operator 2 (aten::relu) is called under smp::partition(7), "
            "but the partitions are 0 to 1. Name one of them, or ask for more partitions.");
}

TEST(PinErrors, OneOperatorTwoPartitions) {
  GraphBuilder b;
  const Ref w = b.parameter("w", ones(4, 4)), v = b.parameter("v", ones(4, 4));
  b.backward(b.op("aten::matmul", {w, v}));
  EXPECT_EQ(error_of<PartitionError>([&] {
              partition(b.graph(), PartitionOptions(2).pinned(Owners{{"w", 0}, {"v", 1}}));
            }),
            "[smp] cannot partition: parameter \"w\" is pinned to partition 0, where operator 0 "
            "(aten::matmul) must run, but parameter \"v\" is pinned to partition 1, where operator "
            "0 (aten::matmul) must run. One operator runs on one partition: pin both tensors to "
            "the same.");
}

TEST(PinErrors, AScopeAroundTheFirstReadOfAPinnedParameter) {
  Layers model(2);
  model.scope(3, 0);
  EXPECT_EQ(model.error(PartitionOptions(2).pinned(Owners{{"fc1.weight", 1}})),
            "[smp] cannot partition: parameter \"fc1.weight\" is pinned to partition 1, where "
            "operator 3 (aten::t) must run, but operator 3 (aten::t) is called under "
            "smp::partition(0). The first operator to use a tensor runs where the tensor is: pin "
            "the tensor to the scope's partition, or call its module outside of the scope.");
}

TEST(PinErrors, APinAgainstASettledOwner) {
  Layers model(2);
  model.scope(0, 1);
  EXPECT_EQ(model.error(PartitionOptions(2).owner(Owners{{"fc0.weight", 0}})),
            "[smp] cannot partition: parameter \"fc0.weight\" belongs to partition 0, where "
            "operator 0 (aten::t) must run, but operator 0 (aten::t) is called under "
            "smp::partition(1). Call the step function that uses both as it does here first, so "
            "that it settles who owns what.");
}

TEST(PinErrors, AnIllegalCut) {
  GraphBuilder b = written_by_a_view();
  b.graph().operators[1].mode.partition = 0;
  b.graph().operators[2].mode.partition = 1;
  const std::string expected =
      "[smp] cannot keep the pins: operator 1 (aten::select.int) is called under "
      "smp::partition(0), but operator 2 (aten::relu_) is called under smp::partition(1); every "
      "cut between them is illegal, the last, 1|2, because operator 2 (aten::relu_) writes the "
      "storage that %1 and %2 share, and both are used after the cut. Pin both to one partition, "
      "or replace operators that work in place by ones that return a new tensor.";
  for (const bool automatic : {false, true}) {
    EXPECT_EQ(error_of<PartitionError>(
                  [&] { partition(b.graph(), PartitionOptions(2).auto_partition(automatic)); }),
              expected);
  }
}

TEST(PinErrors, NoRoomBetweenTwoPins) {
  Layers model(2);
  EXPECT_EQ(model.error(PartitionOptions(5).pinned(Owners{{"fc0.weight", 0}, {"fc1.weight", 4}})),
            "[smp] cannot keep the pins: parameter \"fc0.weight\" is pinned to partition 0, where "
            "operator 1 (aten::matmul) must run, but parameter \"fc1.weight\" is pinned to "
            "partition 4, where operator 3 (aten::t) must run, and between the two there are too "
            "few operators for the 3 stages that come between them. Pin fewer operators, or ask "
            "for fewer partitions.");
}

/// Where operators stay together, the error says which and why.
TEST(PinErrors, NoRoomBetweenTwoPinsAmongOperatorsThatStayTogether) {
  GraphBuilder b;
  const Ref w = b.parameter("w", ones(2, 2));
  Ref x = b.input(ones(2, 2));
  for (int i = 0; i < 5; ++i) {
    x = b.op("aten::matmul", {x, w});
    b.graph().operators.back().mode.autocast_cpu = i > 0 && i < 4;
  }
  b.backward(b.op("aten::sum", {x, c10::IValue()}));
  b.graph().operators[0].mode.partition = 0;
  b.graph().operators[4].mode.partition = 3;
  EXPECT_EQ(error_of<PartitionError>([&] { partition(b.graph(), PartitionOptions(4)); }),
            "[smp] cannot keep the pins: operator 0 (aten::matmul) is called under "
            "smp::partition(0), but operator 4 (aten::matmul) is called under smp::partition(3), "
            "and between the two there are too few operators for the 2 stages that come between "
            "them: 2 of the 4 cuts between them are illegal, the first of these 1|2: parameter "
            "\"w\" is cast once for operator 1 (aten::matmul) and operator 3 (aten::matmul), which "
            "run under one autocast scope, so they stay together. Pin fewer operators, or ask for "
            "fewer partitions.");
}

}  // namespace
}  // namespace smp::partitioner::testing
