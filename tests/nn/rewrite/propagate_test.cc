// SPDX-License-Identifier: Apache-2.0
// A run that goes on from another one finds what a run of its own would.

#include "nn/rewrite/propagate.h"

#include <memory>
#include <random>
#include <set>

#include "examples/gpt/gpt_model.h"
#include "tests/nn/rewrite/harness.h"

namespace smp::nn::rewrite::testing {
namespace {

struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  Tensors inputs;
  Function step;
};

Subject gpt_subject() {
  const auto options = gpt::GPTOptions().layers(2).width(24).heads(4).sequence(6).tied(true);
  auto net = std::make_shared<gpt::GPTImpl>(options);
  net->to(torch::kDouble);
  return {net,
          {torch::randint(256, {2, 6}), torch::randint(256, {2, 6})},
          [net](const Tensors& in) -> Tensors {
            return {torch::nn::functional::cross_entropy(net->forward(in[0]).flatten(0, 1),
                                                         in[1].flatten())};
          }};
}

/// Storages that are written, some of which must be whole where a part is not enough.
Subject written_subject() {
  torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8),
                            torch::nn::Linear(8, 8));
  net->to(torch::kDouble);
  return {net.ptr(),
          {torch::rand({4, 8}, torch::kDouble)},
          [net](const Tensors& in) mutable -> Tensors {
            auto h = net[0]->as<torch::nn::Linear>()->forward(in[0]);
            auto rows = torch::zeros_like(h);
            rows.narrow(1, 0, 4).copy_(h.narrow(1, 2, 4));
            rows = net[1]->as<torch::nn::Linear>()->forward(rows).relu_();
            rows.add_(h);
            rows.cumsum_(1);
            return {net[2]->as<torch::nn::Linear>()->forward(rows).square().mean()};
          }};
}

/// Some weights, and some sums as streams, divided along some dimension.
Constraints random_constraints(const Propagation& propagation, int ranks, std::mt19937& random) {
  const Graph& graph = propagation.graph();
  Constraints constraints;
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const graph::Value& value = graph.values[v];
    const bool is_parameter = value.kind == graph::ValueKind::kParameter;
    const bool is_sum =
        value.producer >= 0 && graph.operators[value.producer].name() == "aten::add.Tensor";
    if (value.meta.sizes.size() < 2 || !(is_parameter || is_sum) || random() % 3 > 0) continue;
    const int dim = static_cast<int>(random() % 2);
    if (!can_divide(value.meta.sizes, dim, 1, ranks)) continue;
    constraints.emplace(static_cast<graph::ValueId>(v), Layout::divided(dim));
  }
  return constraints;
}

void expect_same(const Outcome& got, const Outcome& expected) {
  EXPECT_EQ(got.us, expected.us);
  EXPECT_EQ(got.kept_bytes, expected.kept_bytes);
  EXPECT_EQ(got.joined_parameters, expected.joined_parameters);
  EXPECT_EQ(got.wishes.size(), expected.wishes.size());
  EXPECT_EQ(got.obstacles.size(), expected.obstacles.size());
  EXPECT_TRUE(got.layouts == expected.layouts);
  EXPECT_EQ(got.in_stream, expected.in_stream);
  ASSERT_EQ(got.treatments.size(), expected.treatments.size());
  for (size_t i = 0; i < got.treatments.size(); ++i) {
    EXPECT_TRUE(got.treatments[i]->arguments == expected.treatments[i]->arguments) << i;
    EXPECT_TRUE(got.treatments[i]->results == expected.treatments[i]->results) << i;
  }
}

TEST(PropagationTest, GoesOnFromAnyOtherRun) {
  torch::manual_seed(1);
  std::mt19937 random(1);
  for (const Subject& subject : {gpt_subject(), written_subject()}) {
    const TensorTable table = table_of(*subject.module);
    const auto graph = capture(table, subject.inputs, training(subject.step));
    const DivideOptions options = memory_options(table, /*ranks=*/2);
    Propagation propagation(*graph, options);
    std::set<double> times;
    Outcome last;
    for (int run = 0; run < 200; ++run) {
      const Constraints constraints = random_constraints(propagation, options.ranks, random);
      if (run % 10 == 9) propagation.recall(last);
      last = propagation.run(constraints);
      SCOPED_TRACE(run);
      expect_same(last, Propagation(*graph, options).run(constraints));
      times.insert(last.us);
      if (::testing::Test::HasFailure()) return;
    }
    EXPECT_GT(times.size(), 10u);
  }
}

}  // namespace
}  // namespace smp::nn::rewrite::testing
