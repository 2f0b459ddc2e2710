// SPDX-License-Identifier: Apache-2.0
#include "partitioner/plan.h"

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "partitioner/complete.h"
#include "partitioner/cost.h"
#include "partitioner/verify.h"
#include "tests/error_of.h"
#include "tests/partitioner/graph_builder.h"

namespace smp::partitioner::testing {
namespace {

using graph::Graph;
using smp::testing::error_or_none;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

at::Tensor unit_costs(int64_t rows, int64_t columns) { return at::ones({rows, columns}); }

// ---- Cost ------------------------------------------------------------------------------------

TEST(Cost, SharesOfMemoryAndTime) {
  GraphBuilder b;
  Ref x = b.input(unit_costs(2, 4));
  for (const char* name : {"w0", "w1"}) {
    const Ref transposed = b.op("aten::t", {b.parameter(name, unit_costs(4, 4))});  // 64 bytes
    x = b.op("aten::matmul", {x, transposed});
    b.cost(10, 20);
  }
  x = b.op("aten::mean", {x, c10::IValue()});
  b.backward(x);
  Graph& graph = b.graph();
  graph.operators[1].cost.saved_bytes = 128;
  const std::vector<double> costs = operator_costs(graph, 0.25);
  EXPECT_DOUBLE_EQ(costs[0], 0.25 * 64 / 256);
  EXPECT_DOUBLE_EQ(costs[1], 0.25 * 128 / 256 + 0.75 * 30 / 60);
  EXPECT_DOUBLE_EQ(costs[2], 0.25 * 64 / 256);
  EXPECT_DOUBLE_EQ(costs[3], 0.75 * 30 / 60);
  EXPECT_DOUBLE_EQ(costs[4], 0);
  graph.roots.clear();
  EXPECT_DOUBLE_EQ(operator_time_us(graph, graph.operators[1]), 10) << "no backward";
}

TEST(Cost, TotalsOfZero) {
  GraphBuilder b;
  b.grad_mode = false;
  Ref x = b.op("aten::relu", {b.input(unit_costs(2, 2))});
  b.output(b.op("aten::relu", {x}));
  EXPECT_THAT(operator_costs(b.graph(), 0.5), ElementsAre(0.5, 0.5));
  b.graph().operators[0].cost.forward_us = 3;
  EXPECT_THAT(operator_costs(b.graph(), 0.5), ElementsAre(0.5, 0.0));
}

TEST(Cost, ATiedWeightCountsOnce) {
  GraphBuilder b;
  const Ref w = b.parameter("w", unit_costs(2, 2));
  const Ref x = b.op("aten::matmul", {b.input(unit_costs(2, 2)), w});
  b.output(b.op("aten::matmul", {x, w}));
  EXPECT_THAT(parameter_bytes(b.graph()), ElementsAre(16, 0));
}

TEST(Cost, EstimatesFromAMeasuredGraphAndFromBytes) {
  const auto build = [](int64_t rows, bool more) {
    GraphBuilder b;
    b.scope = "fc";
    const Ref w = b.parameter("fc.weight", unit_costs(4, 4));
    Ref x = b.op("aten::matmul", {b.input(unit_costs(rows, 4)), w});
    b.cost(10, 20, 1000);
    x = b.op("aten::relu", {x});
    b.cost(1, 2, 100);
    if (more) x = b.op("aten::relu", {x});
    if (more) x = b.op("aten::t", {x});
    b.backward(x);
    return b;
  };
  GraphBuilder measured = build(8, false), graph = build(4, true);
  estimate_costs(graph.graph(), &measured.graph());
  const auto& ops = graph.graph().operators;
  EXPECT_DOUBLE_EQ(ops[0].cost.forward_us, 5) << "half the rows";
  EXPECT_DOUBLE_EQ(ops[0].cost.backward_us, 10);
  EXPECT_EQ(ops[0].cost.saved_bytes, 500);
  EXPECT_EQ(ops[0].cost.output_bytes, 64);
  EXPECT_DOUBLE_EQ(ops[1].cost.forward_us, 0.5);
  EXPECT_DOUBLE_EQ(ops[2].cost.forward_us, 1 + 128 / 5000.0) << "a second relu is not known";
  EXPECT_DOUBLE_EQ(ops[2].cost.backward_us, 2 * ops[2].cost.forward_us);
  EXPECT_EQ(ops[2].cost.saved_bytes, 64);
  EXPECT_DOUBLE_EQ(ops[3].cost.forward_us, 1) << "a view moves nothing";
  EXPECT_EQ(ops[3].cost.output_bytes, 0);
}

// ---- Verification ----------------------------------------------------------------------------

/// A plan of three stages with a skip, a tied weight and a written buffer.
struct Verified : ::testing::Test {
  GraphBuilder b;
  Plan plan;
  Ref skip, tied;

  void SetUp() override {
    tied = b.parameter("tied", unit_costs(2, 2));
    const Ref count = b.buffer("count", unit_costs(2, 2));
    skip = b.op("aten::matmul", {b.input(unit_costs(2, 2)), tied});  // 0: stage 0
    Ref x = b.op("aten::relu", {skip});                              // 1: stage 1
    b.op("aten::add_.Scalar", {count, 1, 1});                        // 2: stage 1
    x = b.op("aten::add.Tensor", {x, count, 1});                     // 3: stage 1
    x = b.op("aten::add.Tensor", {x, skip, 1});                      // 4: stage 2
    x = b.op("aten::matmul", {x, tied});                             // 5: stage 2
    b.backward(x);
    b.output(x);
    plan = complete_plan(b.graph(), {0, 1, 2}, {0, 1, 1, 1, 2, 2}, {});
    plan.reason_of_operator.assign(6, "by hand");
  }

  /// The skip's way.
  std::vector<Transfer> skip_transfers() const {
    std::vector<Transfer> result;
    for (const Transfer& transfer : plan.transfers) {
      if (transfer.value == skip.id) result.push_back(transfer);
    }
    return result;
  }

  std::string violation(const std::function<void(Plan&)>& mutate) {
    Plan mutated = plan;
    mutate(mutated);
    return error_or_none([&] { verify_plan(b.graph(), mutated); });
  }
};

TEST_F(Verified, ASoundPlanPasses) {
  EXPECT_EQ(violation([](Plan&) {}), "");
  EXPECT_THAT(skip_transfers(),
              ElementsAre(Transfer{skip.id, 0, 1, true}, Transfer{skip.id, 1, 2, true}));
}

TEST_F(Verified, EveryMutationIsFound) {
  const std::vector<std::pair<std::function<void(Plan&)>, std::string>> cases = {
      {[](Plan& p) { p.stage_of_operator.pop_back(); }, "expected a stage for each of the 6"},
      {[](Plan& p) { p.reason_of_operator.clear(); }, "expected a reason for each of the 6"},
      {[](Plan& p) { p.stage_of_operator[3] = 0; },
       "operator 3: expected a stage from 1 to 2, got 0"},
      {[](Plan& p) { p.stage_of_operator[5] = 3; }, "expected a stage from 2 to 2, got 3"},
      {[](Plan& p) { p.stage_of_operator[3] = 2; },
       "the cut between operators 2 and 3 is illegal: buffer \"count\" is written"},
      {[](Plan& p) { p.transfers.erase(p.transfers.begin()); },
       "expected it to go on from stage 0 to a later one, got 1 -> 2"},
      {[](Plan& p) { p.transfers.erase(p.transfers.begin() + 1); },
       "stage 2 uses %3 of stage 0, but no transfer brings it there"},
      {[](Plan& p) {
         p.transfers.erase(p.transfers.begin());
         p.transfers[0].from = 0;
       },
       "it passes stage 1, which uses it"},
      {[](Plan& p) {
         p.transfers.push_back({7, 2, 3, false});
       },
       "stage 3 does not use it"},
      {[](Plan& p) { std::swap(p.transfers.front(), p.transfers.back()); },
       "transfers are ordered by value"},
      {[](Plan& p) { p.transfers[0].value = 0; }, "only results of operators cross"},
      {[](Plan& p) { p.owner.erase("tied"); }, "parameter \"tied\" has no owner"},
      {[](Plan& p) { p.owner["tied"] = 9; }, "expected an owner from 0 to 2, got 9"},
      {[](Plan& p) { p.owner["ghost"] = 0; }, "the graph has no such parameter or buffer"},
      {[](Plan& p) { p.owner["count"] = 0; },
       "is written by operator 2 (aten::add_.Scalar) on stage 1, but stage 0 owns it"},
      {[](Plan& p) { p.replicas.clear(); },
       "stage 2 reads parameter \"tied\" of stage 0, but has no replica of it"},
      {[](Plan& p) { p.replicas[0].stage = 1; }, "stage 1 does not read it, or owns it"},
      {[](Plan& p) { p.replicas[0].owner = 1; }, "expected owner 0, got 1"},
      {[](Plan& p) { p.replicas.push_back(p.replicas[0]); }, "two replicas"},
      {[](Plan& p) { p.replicas[0].gradient_to = 1; },
       "its gradient goes to stage 1, which has none to add"},
      {[](Plan& p) { p.stage_of_output[0] = 0; }, "output 0: expected stage 2"},
      {[](Plan& p) { p.stage_of_output.clear(); }, "expected a stage for each of the 1 outputs"},
      {[](Plan& p) { p.stage_of_root.clear(); }, "for each of the 1 backward roots, got 0"},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::string text = violation(cases[i].first);
    EXPECT_THAT(text, HasSubstr(cases[i].second)) << "case " << i;
    EXPECT_THAT(text, HasSubstr("plan: ")) << "case " << i;
  }
}

TEST_F(Verified, ARankThatRunsTwoStages) {
  plan = complete_plan(b.graph(), {0, 1, 0}, {0, 1, 1, 1, 2, 2}, {});
  plan.reason_of_operator.assign(6, "by hand");
  EXPECT_EQ(violation([](Plan&) {}), "");
  EXPECT_EQ(plan.owner.at("tied"), 0) << "the first of the rank's stages that reads it";
  EXPECT_EQ(plan.rank_of_stage[plan.owner.at("count")], 1);
  EXPECT_THAT(plan.replicas, ElementsAre(Replica{tied.id, 0, 2, 0, true}))
      << "the gradient still travels from stage to stage";
  EXPECT_THAT(violation([](Plan& p) {
                p.rank_of_stage = {0, 2, 0};
              }),
              HasSubstr("expected a stage for each of the ranks 0 to 2, got stages for 2 ranks"));
  // Owners that are settled are named by rank.
  const Plan fixed = complete_plan(b.graph(), {0, 1, 0}, {0, 1, 1, 1, 2, 2}, {{"tied", 0}});
  EXPECT_EQ(fixed.to_string(), plan.to_string());
}

/// Gradients travel to earlier stages: an owner's later stage will not do.
TEST(CompletePlan, AFixedOwnerComesBeforeEveryReaderWithAGradient) {
  GraphBuilder b;
  const Ref w = b.parameter("w", unit_costs(2, 2));
  Ref x = b.op("aten::relu", {b.input(unit_costs(2, 2))});  // 0: stage 0 on rank 1
  x = b.op("aten::matmul", {x, w});                         // 1: stage 1 on rank 0
  x = b.op("aten::matmul", {x, w});                         // 2: stage 2 on rank 1
  b.backward(x);
  Plan plan = complete_plan(b.graph(), {1, 0, 1}, {0, 1, 2}, {{"w", 1}});
  EXPECT_EQ(plan.owner.at("w"), 0) << "not stage 2, which reads it after stage 1";
  EXPECT_THAT(plan.replicas,
              ElementsAre(Replica{w.id, 0, 1, 0, true}, Replica{w.id, 0, 2, 1, true}));
  plan.reason_of_operator.assign(3, "by hand");
  EXPECT_EQ(error_or_none([&] { verify_plan(b.graph(), plan); }), "");
}

/// A root's own gradient comes first into the sum, so its backward starts where the last of the
/// others does.
TEST(CompletePlan, ABackwardStartsAfterTheLastUseOfItsRoot) {
  GraphBuilder b;
  const Ref w = b.parameter("w", unit_costs(2, 2));
  const Ref in = b.input(unit_costs(2, 2));
  const Ref hidden = b.op("aten::matmul", {in, w});  // 0: stage 0
  const Ref loss = b.op("aten::tanh", {hidden});     // 1: stage 1
  b.op("aten::detach", {hidden});                    // 2: stage 2
  b.backward(hidden, in);
  b.backward(loss, in);
  Plan plan = complete_plan(b.graph(), {0, 1, 2}, {0, 1, 2}, {});
  EXPECT_THAT(plan.stage_of_root, ElementsAre(1, 1)) << "nothing comes back through the detach";
  EXPECT_THAT(plan.transfers,
              ElementsAre(Transfer{hidden.id, 0, 1, true}, Transfer{hidden.id, 1, 2, false}));
  plan.reason_of_operator.assign(3, "by hand");
  EXPECT_EQ(error_or_none([&] { verify_plan(b.graph(), plan); }), "");
}

// ---- Recomputation ---------------------------------------------------------------------------

/// A mask made from an input, used on two stages beside a parameter.
struct Masked : ::testing::Test {
  GraphBuilder b;
  Plan plan;
  Ref mask;

  void build(double mask_us) {
    const Ref w = b.parameter("w", unit_costs(64, 64));
    const Ref in = b.input(unit_costs(64, 64));
    mask = b.op("aten::gt.Scalar", {in, 0});  // 0
    b.cost(mask_us, 0);
    mask = b.op("aten::logical_not", {mask});  // 1
    Ref x = b.op("aten::matmul", {in, w});     // 2: stage 0
    x = b.op("aten::mul.Tensor", {x, mask});   // 3: stage 1
    x = b.op("aten::mul.Tensor", {x, mask});   // 4: stage 2
    b.backward(x);
    plan = complete_plan(b.graph(), {0, 1, 2}, {0, 0, 0, 1, 2}, {});
    plan.reason_of_operator.assign(5, "by hand");
  }

  int transfers_of_mask() const {
    int count = 0;
    for (const Transfer& transfer : plan.transfers) count += transfer.value == mask.id;
    return count;
  }

  std::string violation(const std::function<void(Plan&)>& mutate) {
    Plan mutated = plan;
    mutate(mutated);
    return error_or_none([&] { verify_plan(b.graph(), mutated); });
  }
};

TEST_F(Masked, IsMadeAgainWhereThatIsCheaper) {
  build(/*mask_us=*/1);
  EXPECT_EQ(violation([](Plan&) {}), "");
  EXPECT_THAT(plan.recomputed,
              ElementsAre(Recomputed{0, 1}, Recomputed{1, 1}, Recomputed{0, 2}, Recomputed{1, 2}));
  EXPECT_EQ(transfers_of_mask(), 0);
}

TEST_F(Masked, IsSentWhereThatIsCheaper) {
  build(/*mask_us=*/1000);
  EXPECT_EQ(violation([](Plan&) {}), "");
  EXPECT_THAT(plan.recomputed, ElementsAre());
  EXPECT_EQ(transfers_of_mask(), 2);
}

/// A stage that makes a root's gradient again needs none sent.
TEST_F(Masked, IsTheGradientOfARoot) {
  build(/*mask_us=*/1);
  b.graph().roots[0].gradient = mask.id;
  plan = complete_plan(b.graph(), {0, 1, 2}, {0, 0, 0, 1, 2}, {});
  plan.reason_of_operator.assign(5, "by hand");
  EXPECT_EQ(transfers_of_mask(), 0);
  EXPECT_EQ(violation([](Plan&) {}), "");
}

TEST_F(Masked, UnsoundRecomputationIsFound) {
  build(/*mask_us=*/1);
  EXPECT_THAT(violation([](Plan& p) { p.recomputed.erase(p.recomputed.begin()); }),
              HasSubstr("operator 1 (aten::logical_not) is recomputed on stage 1, but %2 is not "
                        "there as it was, or is written"));
  EXPECT_THAT(violation([](Plan& p) { p.recomputed.clear(); }),
              HasSubstr("but no transfer brings it there"));
  EXPECT_THAT(violation([](Plan& p) {
                p.recomputed.push_back({4, 2});
              }),
              HasSubstr("which is not a later one than its own"));
  EXPECT_THAT(violation([](Plan& p) {
                p.recomputed.push_back({2, 2});
              }),
              HasSubstr("parameter \"w\" is not there as it was, or is written"));
}

// ---- Plan as text ----------------------------------------------------------------------------

TEST_F(Verified, PlanPrints) {
  EXPECT_EQ(plan.to_string(),
            "plan of 3 stages on ranks 0, 1, 2\n"
            "stage 0: operators 0-0\n"
            "stage 1: operators 1-3\n"
            "stage 2: operators 4-5\n"
            "transfer %3: 0 -> 1, gradient back\n"
            "transfer %3: 1 -> 2, gradient back\n"
            "transfer %6: 1 -> 2, gradient back\n"
            "replica %0: 0 -> 2, gradient to 0\n"
            "owner of count: 1\n"
            "owner of tied: 0\n"
            "output 0: 2\n"
            "root 0: 2\n");
  Plan other = plan;
  EXPECT_EQ(other.to_string(), plan.to_string());
  other.reason_of_operator[0] = "reasons do not count";
  EXPECT_EQ(other.to_string(), plan.to_string());
  other.transfers[0].needs_gradient = false;
  EXPECT_NE(other.to_string(), plan.to_string());
}

}  // namespace
}  // namespace smp::partitioner::testing
