// SPDX-License-Identifier: Apache-2.0
#include "partitioner/cuts.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <iostream>

#include "partitioner/complete.h"
#include "partitioner/partition.h"
#include "tests/partitioner/random_graph.h"

namespace smp::partitioner::testing {
namespace {

using graph::Graph;

std::vector<int> stages_of_cuts(size_t operators, const std::vector<int>& cuts) {
  std::vector<int> stages(operators);
  for (size_t i = 0; i < operators; ++i) {
    for (int cut : cuts) stages[i] += static_cast<int>(i) > cut ? 1 : 0;
  }
  return stages;
}

/// True if a run in stages gives the outputs, and the writes, of the program in one piece, exactly.
/// A run may be impossible: a value that never arrives.
bool same_results(RandomProgram& program, const Plan& plan) {
  const Graph& graph = program.graph();
  const StagedRun run(graph, plan, program.initial());
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    const at::Tensor got = run.output(i);
    if (!got.defined() || !got.equal(program.tensor(graph.outputs[i]))) return false;
  }
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const auto owner = plan.owner.find(graph.values[v].name);
    if (graph.values[v].kind != graph::ValueKind::kBuffer || owner == plan.owner.end()) continue;
    const auto id = static_cast<graph::ValueId>(v);
    if (!run.tensor(owner->second, id).equal(program.tensor(id))) return false;
  }
  return true;
}

TEST(LegalCuts, RandomProgramsRunInStagesAsInOnePiece) {
  const c10::NoGradGuard no_grad;
  int legal_cuts_seen = 0, illegal_cuts_seen = 0, wrong_when_illegal = 0, split_in_three = 0;
  for (unsigned seed = 0; seed < 600; ++seed) {
    RandomProgram program(seed);
    const Graph& graph = program.graph();
    const std::vector<bool> legal = legal_cuts(graph);
    ASSERT_EQ(legal.size(), graph.operators.size() - 1);
    for (int i = 0; i < static_cast<int>(legal.size()); ++i) {
      EXPECT_EQ(legal[i], !why_illegal(graph, i)) << "seed " << seed << " cut " << i;
      const Plan plan =
          complete_plan(graph, {0, 1}, stages_of_cuts(graph.operators.size(), {i}), {});
      const bool same = same_results(program, plan);
      if (legal[i]) {
        ++legal_cuts_seen;
        ASSERT_TRUE(same) << "seed " << seed << " cut " << i << "\n" << graph.to_string();
      } else {
        ++illegal_cuts_seen;
        wrong_when_illegal += same ? 0 : 1;
      }
      for (int k = i + 1; legal[i] && k < static_cast<int>(legal.size()); ++k) {
        if (!legal[k]) continue;
        const Plan three =
            complete_plan(graph, {0, 1, 2}, stages_of_cuts(graph.operators.size(), {i, k}), {});
        ++split_in_three;
        ASSERT_TRUE(same_results(program, three))
            << "seed " << seed << " cuts " << i << " and " << k << "\n"
            << graph.to_string();
      }
    }
  }
  std::cout << legal_cuts_seen << " legal cuts, " << split_in_three << " pairs of them, "
            << illegal_cuts_seen << " illegal cuts, of which " << wrong_when_illegal
            << " give wrong results\n";
  EXPECT_GT(legal_cuts_seen, 1000);
  EXPECT_GT(split_in_three, 1000);
  // The rule looks at aliases, not at contents: it may refuse a cut that is harmless (a relu_ on
  // positive numbers, a value overwritten before it is read), but many refusals must be needed.
  EXPECT_GT(5 * wrong_when_illegal, illegal_cuts_seen);
}

TEST(LegalCuts, AllowsAWriteThroughTheOnlyAlias) {
  GraphBuilder b;
  b.grad_mode = false;
  Ref x = b.input(at::ones({2, 2}));
  x = b.op("aten::relu", {x});
  x = b.op("aten::relu_", {x});
  b.output(b.op("aten::relu", {x}));
  EXPECT_EQ(legal_cuts(b.graph()), std::vector<bool>({true, true}));
  EXPECT_EQ(why_illegal(b.graph(), 0), std::nullopt);
}

TEST(LegalCuts, RefusesAWriteThatAnotherAliasSees) {
  GraphBuilder b;
  b.grad_mode = false;
  const Ref y = b.op("aten::relu", {b.input(at::ones({2, 2}))});
  const Ref row = b.op("aten::select.int", {y, 0, 0});
  b.op("aten::relu_", {row});
  b.output(b.op("aten::relu", {y}));
  EXPECT_EQ(legal_cuts(b.graph()), std::vector<bool>({true, false, true}));
  EXPECT_EQ(why_illegal(b.graph(), 1),
            "operator 2 (aten::relu_) writes the storage that %1 and %2 share, and both are used "
            "after the cut");
}

TEST(LegalCuts, AnOutputIsUsedAfterTheLastWrite) {
  GraphBuilder b = written_by_a_view();
  EXPECT_EQ(legal_cuts(b.graph()), std::vector<bool>({true, false}));
  const Plan plan = partition(b.graph(), PartitionOptions(2));
  EXPECT_EQ(plan.stage_of_operator, std::vector<int>({0, 1, 1}));
  EXPECT_EQ(plan.stage_of_output, std::vector<int>({1}))
      << "y is complete where its row is written";
}

/// Its history is where it was written, so its backward starts there.
TEST(LegalCuts, KeepsABackwardRootWithTheBufferThatItIs) {
  GraphBuilder b;
  const Ref state = b.buffer("state", at::zeros({2}));
  const Ref w = b.parameter("w", at::ones({2}));
  const Ref row = b.op("aten::select.int", {state, 0, 0});
  b.op("aten::add_.Tensor", {row, b.op("aten::sum", {w, c10::IValue()}), 1});
  const Ref ones = b.op("aten::relu", {b.input(at::ones({2}))});
  b.backward(state, b.op("aten::mul.Scalar", {ones, 2}));
  EXPECT_EQ(legal_cuts(b.graph()), std::vector<bool>({false, false, false, false}));
  EXPECT_EQ(why_illegal(b.graph(), 3),
            "buffer \"state\" is written by operator 2 (aten::add_.Tensor), so all its users, "
            "operators 0 to 4, stay together");
}

/// The gradients of the cast weight are added before they are cast back.
TEST(LegalCuts, KeepsTheUsersOfAWeightInOneAutocastScopeTogether) {
  GraphBuilder b;
  const Ref w = b.parameter("w", at::ones({2, 2}));
  const Ref once = b.parameter("once", at::ones({2, 2}));
  Ref x = b.input(at::ones({2, 2}));
  for (const Ref weight : {w, once, w, w}) {
    x = b.op("aten::matmul", {x, weight});
    b.graph().operators.back().mode.autocast_cpu = true;
  }
  x = b.op("aten::tanh", {x});       // ends the scope
  x = b.op("aten::matmul", {x, w});  // is none of it
  b.backward(b.op("aten::sum", {x, c10::IValue()}));
  EXPECT_EQ(legal_cuts(b.graph()), std::vector<bool>({false, false, false, true, true, true}));
  EXPECT_EQ(why_illegal(b.graph(), 1),
            "parameter \"w\" is cast once for operator 0 (aten::matmul) and operator 3 "
            "(aten::matmul), which run under one autocast scope, so they stay together");
  b.graph().operators[2].mode.autocast_cpu = false;  // two scopes, and one use in the first
  EXPECT_EQ(why_illegal(b.graph(), 0), std::nullopt);
  b.graph().operators[2].mode.autocast_cpu = true;
  b.graph().roots.clear();
  EXPECT_EQ(why_illegal(b.graph(), 1), std::nullopt) << "without gradients it does not matter";
}

/// On GPUs autocast casts the arguments of operators that it leaves alone on the CPU.
TEST(LegalCuts, KnowsWhatTheAutocastOfEachDeviceCasts) {
  GraphBuilder b;
  const Ref w = b.parameter("w", at::ones({2, 2}));
  Ref x = b.input(at::ones({2}));
  for (int i = 0; i < 2; ++i) {
    x = b.op("aten::mv", {w, x});
    b.graph().operators.back().mode.autocast_cpu = true;
  }
  b.backward(b.op("aten::sum", {x, c10::IValue()}));
  EXPECT_EQ(legal_cuts(b.graph()), std::vector<bool>({true, true}));
  for (int i = 0; i < 2; ++i) b.graph().operators[i].mode.autocast_accelerator = true;
  EXPECT_EQ(legal_cuts(b.graph()), std::vector<bool>({false, true})) << "of both";
  for (int i = 0; i < 2; ++i) b.graph().operators[i].mode.autocast_cpu = false;
  EXPECT_EQ(legal_cuts(b.graph()), std::vector<bool>({false, true}));
}

/// Only the stage that made the view knows its base.
TEST(LegalCuts, KeepsAViewWithWhatTurnsItUnderNoGrad) {
  GraphBuilder b;
  const Ref w = b.parameter("w", at::ones({4, 2}));
  const Ref view = b.op("aten::slice.Tensor", {b.op("aten::tanh", {w}), 0, 0, 4, 2});
  const Ref turned = b.op("aten::transpose_", {view, 0, 1});
  b.backward(b.op("aten::sum", {turned, c10::IValue()}));
  EXPECT_EQ(legal_cuts(b.graph()), std::vector<bool>({true, true, true}));
  b.graph().operators[2].mode.grad = false;
  EXPECT_EQ(legal_cuts(b.graph()), std::vector<bool>({true, false, true}));
  EXPECT_EQ(
      why_illegal(b.graph(), 1),
      "operator 2 (aten::transpose_) makes another view of what operator 1 (aten::slice.Tensor) "
      "returned, in place and under no_grad, so they stay together");
}

TEST(LegalCuts, KeepsTheUsersOfAWrittenBufferTogetherButNotTheOthers) {
  GraphBuilder b;
  b.grad_mode = false;
  const Ref mean = b.buffer("bn.mean", at::ones({2}));
  Ref x = b.op("aten::relu", {b.input(at::ones({2, 2}))});
  x = b.op("aten::add.Tensor", {x, mean, 1});
  x = b.op("aten::relu", {x});
  b.op("aten::add_.Tensor", {mean, mean, 1});
  b.output(b.op("aten::relu", {x}));
  EXPECT_EQ(legal_cuts(b.graph()), std::vector<bool>({true, false, false, true}));
  EXPECT_EQ(why_illegal(b.graph(), 2),
            "buffer \"bn.mean\" is written by operator 3 (aten::add_.Tensor), so all its users, "
            "operators 1 to 3, stay together");
}

TEST(SplitWeights, NamesTheParameterWhoseTransposeWouldCross) {
  GraphBuilder b;
  const Ref w = b.parameter("fc.weight", at::ones({2, 2}));
  const Ref bias = b.parameter("fc.bias", at::ones({2}));
  const Ref y = b.linear("fc", b.op("aten::relu", {b.input(at::ones({2, 2}))}), w, bias);
  b.output(b.op("aten::relu", {y}));
  EXPECT_EQ(split_weights(b.graph()),
            std::vector<graph::ValueId>({graph::kUndefined, w.id, graph::kUndefined}));
  EXPECT_EQ(legal_cuts(b.graph()), std::vector<bool>({true, true, true}));
}

}  // namespace
}  // namespace smp::partitioner::testing
