// SPDX-License-Identifier: Apache-2.0
#include "graph/coalesce.h"

#include <map>

#include "tests/graph/coalesced.h"

namespace smp::graph::testing {
namespace {

/// A chain of the cases that keep [samples, 5, 4], to mix the rules.
TEST(Coalesce, SamplesMayBePermuted) {
  const Body body = [](Weights& w, const Tensors& in) {
    auto x = torch::linear(in[0], w->square, w->row);
    x = x + torch::scaled_dot_product_attention(x, x, x);
    return torch::layer_norm(x, {4}).softmax(1);
  };
  const Tensors inputs = {torch::randn({kAll, 5, 4}, doubles())};
  Captured captured = capture(body, inputs, {0});
  ASSERT_EQ(captured.axes.refusal, std::nullopt);
  const Coalesced coalesced = coalesce(*captured.one, *captured.many, captured.axes, kFactor);
  const auto order = torch::tensor({3, 1, 5, 0, 2, 4});
  const auto straight = torch::cat(replay(coalesced.graph, captured.table, inputs).outputs);
  const auto mixed = torch::cat(
      replay(coalesced.graph, captured.table, {inputs[0].index_select(0, order)}).outputs);
  EXPECT_TRUE(torch::allclose(mixed, straight.index_select(0, order), kTolerance, kTolerance));
}

TEST(Coalesce, CutsOnceWhereMicrobatchesPart) {
  const Body body = training([](Weights& w, const Tensors& in) {
    return torch::cross_entropy_loss(torch::linear(in[0], w->square),
                                     in[1].select(1, 0).to(torch::kLong));
  });
  const Tensors inputs = {torch::randn({kAll, 4}, doubles()), torch::zeros({kAll, 1}, doubles())};
  Captured captured = capture(body, inputs, {0, 0});
  const Coalesced coalesced = coalesce(*captured.one, *captured.many, captured.axes, kFactor);
  std::map<std::string, int> calls;
  for (const Operator& op : coalesced.graph.operators) ++calls[op.name()];
  EXPECT_EQ(calls["aten::linear"], 1);
  EXPECT_EQ(calls["aten::to.dtype"], 1);
  EXPECT_EQ(calls["aten::split.Tensor"], 2);
  EXPECT_EQ(calls["aten::cross_entropy_loss"], kFactor);
  EXPECT_EQ(coalesced.graph.roots.size(), size_t{kFactor});
  EXPECT_EQ(coalesced.run_once(), 3u);
  expect_equals_microbatches(body, inputs, {0, 0}, captured);
}

/// A batch that is not dimension 0: microbatches are cut out of the whole with gaps, and those who
/// read them find the layout that they have on their own. Plain libtorch runs what runs once on all
/// samples at once.
TEST(Coalesce, MicrobatchesLieAsOnTheirOwn) {
  const auto whole = [](Weights& w, const torch::Tensor& x) { return torch::linear(x, w->square); };
  const auto rest = [](const torch::Tensor& x) { return x.view({-1, 4}).softmax(0); };
  const Body body = training([&](Weights& w, const Tensors& in) { return rest(whole(w, in[0])); });
  const Tensors inputs = {torch::randn({5, kAll, 4}, doubles())};
  Captured captured = capture(body, inputs, {1});
  EXPECT_EQ(counts(captured, "aten::linear"), (std::pair<int, int>{1, 0}));
  EXPECT_EQ(counts(captured, "aten::view"), (std::pair<int, int>{0, 1}));
  expect_equals_microbatches(body, inputs, {1}, captured);
  const Coalesced coalesced = coalesce(*captured.one, *captured.many, captured.axes, kFactor);
  const Replayed got = replay(coalesced.graph, captured.table, inputs);
  const torch::Tensor all = whole(captured.weights, inputs[0]);
  for (int part = 0; part < kFactor; ++part) {
    const auto own = all.narrow(1, part * kSamples, kSamples).contiguous();
    EXPECT_TRUE(torch::equal(got.outputs[part], rest(own))) << "microbatch " << part;
  }
}

TEST(Coalesce, MicrobatchesThatLieAsOnTheirOwnAreNotCopied) {
  const Body first = [](Weights& w, const Tensors& in) { return (in[0] * w->row).view({-1}); };
  const Body last = [](Weights& w, const Tensors& in) { return (in[0] * w->row).t().softmax(1); };
  for (const Body& body : {first, last}) {
    const Tensors inputs = {torch::randn({kAll, 4}, doubles())};
    Captured captured = capture(training(body), inputs, {0});
    const Coalesced coalesced = coalesce(*captured.one, *captured.many, captured.axes, kFactor);
    for (const Operator& op : coalesced.graph.operators) EXPECT_NE(op.name(), "aten::clone");
    expect_equals_microbatches(training(body), inputs, {0}, captured);
  }
}

/// Layouts that are dense in another order, and some with gaps.
TEST(Coalesce, CopiesKeepTheOrderOfDimensions) {
  const std::vector<Body> bodies = {
      [](Weights& w, const Tensors& in) {
        const auto x = (in[0] * w->row).permute({2, 0, 1}).contiguous().permute({1, 2, 0});
        return x.permute({2, 0, 1}).view({-1});
      },
      [](Weights& w, const Tensors& in) {
        return (in[0] * w->row).narrow(2, 0, 2).narrow(0, 1, 3).view({-1, 2});
      },
      [](Weights& w, const Tensors& in) {
        return (in[0] * w->row).narrow(2, 1, 1).view({-1, 1}).squeeze(1).softmax(0);
      },
      [](Weights& w, const Tensors& in) {
        return (in[0] * w->row).unsqueeze(2).expand({5, -1, 3, 4}).sum(3).view({-1});
      },
      [](Weights& w, const Tensors& in) { return (in[0] * w->row).transpose(0, 1).sum(2).t(); },
  };
  for (size_t i = 0; i < bodies.size(); ++i) {
    SCOPED_TRACE(i);
    const Body body = training(bodies[i]);
    const Tensors inputs = {torch::randn({5, kAll, 4}, doubles())};
    Captured captured = capture(body, inputs, {1});
    expect_equals_microbatches(body, inputs, {1}, captured);
  }
}

/// A view of a microbatch that is written afterwards is one of the tensor's memory, not of a copy.
TEST(Coalesce, ViewsThatAreWrittenLater) {
  const Body body = training([](Weights& w, const Tensors& in) {
    const auto x = torch::linear(in[0], w->square);
    const auto rows = x.view({-1, 4});
    rows.narrow(0, 0, 3).mul_(w->scale);
    return x.sum({0}) + rows.mean(0) + torch::linear(in[0], w->square).view({-1, 4}).sum(0);
  });
  const Tensors inputs = {torch::randn({5, kAll, 4}, doubles())};
  Captured captured = capture(body, inputs, {1});
  EXPECT_EQ(counts(captured, "aten::linear"), (std::pair<int, int>{1, 1}));
  expect_equals_microbatches(body, inputs, {1}, captured);
}

TEST(Coalesce, DropoutDrawsAtOnceAndOthersForEach) {
  const Body body = [](Weights& w, const Tensors& in) {
    const auto x = torch::dropout(in[0] * w->scale, 0.5, true);
    return x + torch::dropout(w->row, 0.5, true);
  };
  const Tensors inputs = {torch::ones({kAll, 4}, doubles())};
  Captured captured = capture(body, inputs, {0});
  const Coalesced coalesced = coalesce(*captured.one, *captured.many, captured.axes, kFactor);
  std::vector<int> ordinals;
  for (const Operator& op : coalesced.graph.operators) {
    if (op.random_ordinal >= 0) ordinals.push_back(op.random_ordinal);
  }
  EXPECT_EQ(ordinals, (std::vector<int>{0, 1, 2, 3}));
}

TEST(Coalesce, NumbersThatChangeReachAllWhoUseThem) {
  double factor = 2.0;
  const Body body = training([&](Weights& w, const Tensors& in) {
    const auto x = in[0].mul(factor) * w->row;
    return x - x.mean(0).mul(factor);
  });
  const Tensors inputs = {torch::randn({kAll, 4}, doubles())};
  Captured captured = capture(body, inputs, {0});
  const Coalesced coalesced = coalesce(*captured.one, *captured.many, captured.axes, kFactor);
  factor = 3.0;
  const Function step = [&](const Tensors& t) { return Tensors{body(captured.weights, t)}; };
  const auto guarded =
      trace(captured.table, slice(inputs, 0, {0}), step, false, {captured.one.get()});
  ASSERT_EQ(guarded.match, captured.one.get());
  const Replayed got = replay(coalesced.graph, captured.table, inputs, {},
                              coalesced.map.constants(guarded.constants));
  for (int part = 0; part < kFactor; ++part) {
    const auto expected = body(captured.weights, slice(inputs, part, {0}));
    EXPECT_TRUE(torch::allclose(got.outputs[part], expected, kTolerance, kTolerance));
  }
}

core::Refusal refusal_of(const Body& body, const Tensors& inputs) {
  return capture(body, inputs, first_axes(inputs)).axes.refusal;
}

TEST(Coalesce, RefusesAndSaysWhy) {
  const Tensors inputs = {torch::randn({kAll, 4}, doubles())};
  EXPECT_EQ(refusal_of(
                [](Weights& w, const Tensors& in) {
                  return torch::batch_norm(in[0], w->row, w->row, w->mean, w->variance, true, 0.1,
                                           1e-5, false);
                },
                inputs),
            "operator 0 (aten::batch_norm) writes buffer \"mean\", which the "
            "next microbatch would see");
  EXPECT_EQ(refusal_of([](Weights&, const Tensors& in) { return in[0].mul_(2); }, inputs),
            "operator 0 (aten::mul_.Scalar) writes input \"0\", which the next microbatch would "
            "see");
  EXPECT_EQ(refusal_of(
                [](Weights&, const Tensors& in) {
                  return in[0].size(0) > kSamples ? in[0].exp() : in[0].log();
                },
                inputs),
            "on 3 times the samples the function takes another way: operator 0 (aten::log) is "
            "aten::exp there");
  EXPECT_EQ(refusal_of(
                [](Weights& w, const Tensors& in) {
                  auto x = in[0] * w->scale;
                  for (int64_t i = 0; i < in[0].size(0); ++i) x = x + 1;
                  return x;
                },
                inputs),
            "on 3 times the samples the function takes another way: there are 7 operators instead "
            "of 3");
  EXPECT_EQ(refusal_of([](Weights&, const Tensors& in) { return in[0].sum(); }, inputs),
            "no operator is known to treat the samples independently");
  EXPECT_EQ(refusal_of(
                [](Weights& w, const Tensors& in) {
                  testing::backward(w->row.sum());
                  return in[0] * w->row;
                },
                inputs),
            "what it differentiates does not depend on the batch");
}

}  // namespace
}  // namespace smp::graph::testing
