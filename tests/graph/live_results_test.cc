// SPDX-License-Identifier: Apache-2.0
#include "graph/live_results.h"

#include "tests/graph/numbers.h"

namespace smp::graph::testing {
namespace {

/// Traces `function` as a step does, whose result goes on holding the function's.
bool leaves(const TensorTable& table, const torch::Tensor& x, const Function& function) {
  Tensors result;
  return leaves_results(
      trace(table, {x}, [&](const Tensors& in) { return result = function(in); }));
}

TEST_F(Numbers, WhatOnlyTheStepsResultHoldsIsNoState) {
  const torch::Tensor offset = torch::zeros({4, 4});
  const auto left = [&](const Function& function) { return leaves(table_, x_, function); };
  EXPECT_FALSE(left([&](const Tensors& in) -> Tensors { return {net_(in[0]) + offset}; }));
  EXPECT_FALSE(left([&](const Tensors& in) -> Tensors {
    const auto h = net_(in[0]);
    return {h, h.sum(), h, in[0]};
  }));
  // A number and a mask that libtorch and the program make without an operator, and let go.
  EXPECT_FALSE(left([&](const Tensors& in) -> Tensors {
    std::vector<float> mask(16, 1);
    auto h = net_(in[0]) * torch::from_blob(mask.data(), {4, 4});
    h.index_put_({h < 0}, 0.5);
    return {h.mean()};
  }));
  // Values that follow from constants: a table that is made once, and one that counts calls, as a
  // number of the function would.
  torch::Tensor table, calls = torch::zeros({4, 4});
  EXPECT_FALSE(left([&](const Tensors& in) -> Tensors {
    if (!table.defined()) table = torch::arange(4).to(torch::kFloat);
    calls = calls + 1;
    return {net_(in[0]) + table * calls};
  }));
}

TEST_F(Numbers, WhatOutlivesARunBesideItsResultMayBeState) {
  torch::Tensor kept;
  const auto left = [&](const Function& function) {
    kept = torch::zeros({4, 4});
    return leaves(table_, x_, function);
  };
  EXPECT_TRUE(left([&](const Tensors& in) -> Tensors { return {(kept = net_(in[0])).sum()}; }));
  EXPECT_TRUE(left([&](const Tensors& in) -> Tensors { return {kept = net_(in[0])}; }));
  EXPECT_TRUE(left([&](const Tensors& in) -> Tensors { return {in[0] + (kept = in[0])}; }));
  EXPECT_TRUE(left([&](const Tensors& in) -> Tensors {
    const auto h = net_(in[0]);
    kept = h.data();
    return {h};
  }));
  EXPECT_TRUE(left([&](const Tensors& in) -> Tensors {
    kept = torch::zeros({4, 4});
    kept.add_(in[0]);
    return {in[0].sum()};
  }));
}

/// One that has left a known graph has passed it up to there.
TEST_F(Numbers, WhatARunHasLeftBeforeItLeavesAKnownGraph) {
  torch::Tensor kept;
  bool branch = false;
  const auto function = [&](const Tensors& in) -> Tensors {
    auto h = net_(in[0]);
    if (branch) kept = h;
    return {branch ? h.relu() : h.tanh()};
  };
  const TraceResult known = trace(table_, {x_}, function);
  branch = true;
  EXPECT_TRUE(leaves_results(again(known, function)));
}

}  // namespace
}  // namespace smp::graph::testing
