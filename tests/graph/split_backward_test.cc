// SPDX-License-Identifier: Apache-2.0
// A backward pass in two parts gives the bits of one.

#include "graph/split_backward.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/node.h"
#include "graph/autograd_entry.h"

namespace smp::graph {
namespace {

namespace F = torch::nn::functional;
using Tensors = std::vector<torch::Tensor>;

/// Part of a model as a stage runs it: `inputs` come from another stage, `weights` are its own.
struct Part {
  Tensors inputs;
  Tensors weights;
  std::function<Tensors(const Tensors& inputs, const Tensors& weights)> forward;
};

struct Gradients {
  Tensors inputs;
  Tensors weights;
};

class Entered {
 public:
  explicit Entered(const Tensors& tensors) {
    for (const auto& tensor : tensors) {
      sinks.push_back(core::make_node<GradientSink>());
      aliases.push_back(enter(tensor, sinks.back()));
    }
  }
  Tensors gradients() const {
    Tensors result;
    for (const auto& sink : sinks) result.push_back(sink->gradient);
    return result;
  }
  Tensors aliases;
  std::vector<GradientSinkPtr> sinks;
};

/// Where the backward of a part starts, with fixed random gradients.
struct Starts {
  explicit Starts(const Tensors& outputs) {
    torch::manual_seed(11);
    for (const auto& output : outputs) {
      edges.push_back(start_of_backward(output));
      gradients.push_back(torch::randn(output.sizes()));
    }
  }
  std::vector<torch::autograd::Edge> edges;
  Tensors gradients;
};

Gradients whole(const Part& part) {
  const Entered inputs(part.inputs), weights(part.weights);
  const Starts starts(part.forward(inputs.aliases, weights.aliases));
  run_backward(starts.edges, starts.gradients);
  return {inputs.gradients(), weights.gradients()};
}

void expect_same(const Tensors& got, const Tensors& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), expected[i].defined()) << what << " " << i;
    if (!got[i].defined()) continue;
    EXPECT_TRUE(torch::equal(got[i], expected[i])) << what << " " << i;
  }
}

/// Runs the part in two, and checks that the first gives all of the inputs' gradients and none of
/// the weights'.
void expect_divided(const Part& part) {
  const Gradients expected = whole(part);
  const Entered inputs(part.inputs), weights(part.weights);
  auto starts = std::make_unique<Starts>(part.forward(inputs.aliases, weights.aliases));
  SplitBackward split(starts->edges, starts->gradients, inputs.sinks);
  starts.reset();  // frees tensors that the second part does not need
  expect_same(inputs.gradients(), expected.inputs, "gradient of input");
  for (const auto& gradient : weights.gradients()) EXPECT_FALSE(gradient.defined());
  split.run_weights();
  expect_same(weights.gradients(), expected.weights, "gradient of weight");
  EXPECT_EQ(split.kept_bytes(), 0);
}

class SplitBackwardTest : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::set_num_threads(1);
    torch::manual_seed(7);
  }
};

TEST_F(SplitBackwardTest, Perceptron) {
  expect_divided({{torch::randn({5, 8})},
                  {torch::randn({16, 8}), torch::randn({16}), torch::randn({4, 16})},
                  [](const Tensors& x, const Tensors& w) {
                    return Tensors{F::linear(torch::gelu(F::linear(x[0], w[0], w[1])), w[2])};
                  }});
}

TEST_F(SplitBackwardTest, TransformerBlock) {
  constexpr int64_t kWidth = 16, kHeads = 2;
  const auto block = [=](const Tensors& x, const Tensors& w) {
    const auto normed = torch::layer_norm(x[0], {kWidth}, w[0], w[1]);
    auto qkv = F::linear(normed, w[2], w[3]).view({3, 6, 3, kHeads, kWidth / kHeads});
    qkv = qkv.permute({2, 0, 3, 1, 4});
    const auto attended = torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
                              .transpose(1, 2)
                              .reshape({3, 6, kWidth});
    auto h = x[0] + F::linear(attended, w[4], w[5]);
    h = h +
        F::linear(torch::gelu(F::linear(torch::layer_norm(h, {kWidth}, w[6], w[7]), w[8])), w[9]);
    return Tensors{h};
  };
  expect_divided(
      {{torch::randn({3, 6, kWidth})},
       {torch::randn({kWidth}), torch::randn({kWidth}), torch::randn({3 * kWidth, kWidth}),
        torch::randn({3 * kWidth}), torch::randn({kWidth, kWidth}), torch::randn({kWidth}),
        torch::randn({kWidth}), torch::randn({kWidth}), torch::randn({4 * kWidth, kWidth}),
        torch::randn({kWidth, 4 * kWidth})},
       block});
}

TEST_F(SplitBackwardTest, Convolutions) {
  expect_divided({{torch::randn({2, 3, 9, 9})},
                  {torch::randn({8, 3, 3, 3}), torch::randn({8}), torch::randn({4, 8, 3, 3})},
                  [](const Tensors& x, const Tensors& w) {
                    const auto h = torch::conv2d(x[0], w[0], w[1], 1, 1).relu_();
                    return Tensors{torch::max_pool2d(torch::conv2d(h, w[2]), 2)};
                  }});
}

TEST_F(SplitBackwardTest, ProductsSumsAndBroadcasts) {
  expect_divided({{torch::randn({4, 6, 8}), torch::randn({4, 6, 8})},
                  {torch::randn({6, 8}), torch::randn({1, 1, 8}), torch::randn({8}),
                   torch::randn({4, 8, 8}), torch::randn({8})},
                  [](const Tensors& x, const Tensors& w) {
                    auto h = torch::cat({w[1].expand({4, 1, 8}), x[0] + w[0]}, 1);
                    h = torch::bmm(h * w[2], w[3]);
                    return Tensors{h - x[1].mean() / w[4], torch::matmul(x[1], w[2])};
                  }});
}

TEST_F(SplitBackwardTest, SharedWeightsAddUpInTheSameOrder) {
  // The same weight in three products, whose gradients differ by orders of magnitude.
  expect_divided(
      {{torch::randn({5, 8})}, {torch::randn({8, 8})}, [](const Tensors& x, const Tensors& w) {
         auto h = x[0];
         for (const double scale : {1e3, 1e-3, 7.0}) h = F::linear(h.tanh(), w[0]) * scale;
         return Tensors{h};
       }});
}

TEST_F(SplitBackwardTest, ViewsWrittenInPlace) {
  expect_divided({{torch::randn({4, 8})},
                  {torch::randn({8, 8}), torch::randn({4})},
                  [](const Tensors& x, const Tensors& w) {
                    auto h = F::linear(x[0], w[0]);
                    h.select(0, 1).mul_(2.0);
                    return Tensors{h.tanh() * w[1].unsqueeze(1)};
                  }});
}

// A function that cannot be divided is computed in the first part; its result is kept, and given in
// the second.
TEST_F(SplitBackwardTest, BatchNormIsNotDivided) {
  const auto mean = torch::zeros({8}), variance = torch::ones({8});
  expect_divided(
      {{torch::randn({6, 4})},
       {torch::randn({8, 4}), torch::randn({8}), torch::randn({8}), torch::randn({2, 8})},
       [=](const Tensors& x, const Tensors& w) {
         const auto h = torch::batch_norm(F::linear(x[0], w[0]), w[1], w[2], mean.clone(),
                                          variance.clone(), true, 0.1, 1e-5, false);
         return Tensors{F::linear(h, w[3])};
       }});
}

TEST_F(SplitBackwardTest, WithoutInputsAllIsLeftForTheSecondPart) {
  const auto tokens = torch::randint(10, {3, 4});
  expect_divided(
      {{}, {torch::randn({10, 8}), torch::randn({8, 8})}, [=](const Tensors&, const Tensors& w) {
         return Tensors{F::linear(F::embedding(tokens, w[0]), w[1])};
       }});
}

TEST_F(SplitBackwardTest, OutputsOfWeightsAloneAndUnusedOnes) {
  expect_divided({{torch::randn({5, 8}), torch::randn({5, 8})},
                  {torch::randn({8, 8}), torch::randn({8}), torch::randn({3})},
                  [](const Tensors& x, const Tensors& w) {
                    // The second input and the last weight are not used.
                    return Tensors{F::linear(x[0], w[0], w[1]), w[1], w[1].tanh()};
                  }});
}

/// Runs the part in two, and checks that the first gives all gradients.
void expect_whole(const Part& part) {
  const Gradients expected = whole(part);
  const Entered inputs(part.inputs), weights(part.weights);
  const Starts starts(part.forward(inputs.aliases, weights.aliases));
  SplitBackward split(starts.edges, starts.gradients, inputs.sinks);
  expect_same(inputs.gradients(), expected.inputs, "gradient of input");
  expect_same(weights.gradients(), expected.weights, "gradient of weight");
  split.run_weights();
  expect_same(weights.gradients(), expected.weights, "gradient of weight");
}

// A weight used by a function that is divided and by one that is not: its sum must not be divided,
// so nothing is.
TEST_F(SplitBackwardTest, SumsAreNotDivided) {
  expect_whole({{torch::randn({6, 8})},
                {torch::randn({8}), torch::randn({8})},
                [](const Tensors& x, const Tensors& w) {
                  const auto h =
                      torch::batch_norm(x[0] * w[0], w[0], w[1], {}, {}, true, 0.1, 1e-5, false);
                  return Tensors{h * w[0]};
                }});
}

// A list operator gives two views of memory its first history: libtorch refuses to compute some of
// its gradients only.
TEST_F(SplitBackwardTest, AListThatWritesSeveralViewsIsNotDivided) {
  expect_whole({{torch::randn({})}, {torch::randn({4, 8})}, [](const Tensors& x, const Tensors& w) {
                  const auto memory = torch::ones({4, 8});
                  at::_foreach_mul_({memory[0], memory[1]}, x[0]);
                  return Tensors{memory * w[0]};
                }});
}

// Memory that has a history already gives each of them an edge.
TEST_F(SplitBackwardTest, AListThatWritesSeveralViewsOfMemoryWithAHistoryIsDivided) {
  expect_divided(
      {{torch::randn({4, 8})}, {torch::randn({4, 8})}, [](const Tensors& x, const Tensors& w) {
         const auto memory = x[0].sin();
         at::_foreach_mul_({memory[0], memory[1]}, x[0].mean());
         return Tensors{memory * w[0]};
       }});
}

TEST_F(SplitBackwardTest, KeepsTheGradientsOfDividedFunctions) {
  const Part part{{torch::randn({5, 8})},
                  {torch::randn({16, 8}), torch::randn({4, 16})},
                  [](const Tensors& x, const Tensors& w) {
                    return Tensors{torch::mm(torch::mm(x[0], w[0].t()), w[1].t())};
                  }};
  const Entered inputs(part.inputs), weights(part.weights);
  const Starts starts(part.forward(inputs.aliases, weights.aliases));
  const SplitBackward split(starts.edges, starts.gradients, inputs.sinks);
  EXPECT_EQ(split.kept_bytes(), (5 * 16 + 5 * 4) * 4);
}

}  // namespace
}  // namespace smp::graph
