// SPDX-License-Identifier: Apache-2.0
// Weight gradients that matrix products add to buffers are those of a plain backward.

#include "graph/weight_fusion.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <vector>

#include "core/node.h"
#include "graph/autograd_entry.h"
#include "graph/split_backward.h"

namespace smp::graph {
namespace {

namespace F = torch::nn::functional;
using Tensors = std::vector<torch::Tensor>;

struct FusedPart {
  torch::Tensor input;  // from another stage
  Tensors weights;
  std::function<torch::Tensor(const torch::Tensor& x, const Tensors& weights)> forward;
};

/// A forward of the part, whose gradients end in sinks; and where its backward starts.
class Run {
 public:
  explicit Run(const FusedPart& part) {
    const auto x = enter(part.input, input);
    for (const auto& weight : part.weights) {
      sinks.push_back(core::make_node<GradientSink>());
      entered_.push_back(enter(weight, sinks.back()));
    }
    const auto y = part.forward(x, entered_);
    torch::manual_seed(3);
    starts = {start_of_backward(y)};
    gradients = {torch::randn(y.sizes(), y.options())};
  }

  GradientSinkPtr input = core::make_node<GradientSink>();
  std::vector<GradientSinkPtr> sinks;
  std::vector<torch::autograd::Edge> starts;
  Tensors gradients;

 private:
  Tensors entered_;
};

/// Buffers that hold something already, and the gradients added to them or sent to the sinks.
class Sums {
 public:
  explicit Sums(const FusedPart& part) {
    for (const auto& weight : part.weights) buffers.push_back(torch::ones_like(weight));
  }
  std::vector<WeightBuffer> of(const Run& run) const {
    std::vector<WeightBuffer> result;
    for (size_t i = 0; i < buffers.size(); ++i) {
      result.push_back({run.sinks[i], [buffer = buffers[i]] { return buffer; }});
    }
    return result;
  }
  torch::Tensor gradient(const Run& run, size_t i) const {
    const auto& rest = run.sinks[i]->gradient;
    return rest.defined() ? buffers[i] - 1 + rest : buffers[i] - 1;
  }
  Tensors buffers;
};

void expect_gradients(const FusedPart& part, const Run& run, const Sums& sums, const Run& plain) {
  EXPECT_TRUE(torch::equal(run.input->gradient, plain.input->gradient));
  for (size_t i = 0; i < part.weights.size(); ++i) {
    EXPECT_TRUE(torch::allclose(sums.gradient(run, i), plain.sinks[i]->gradient, 1e-12, 1e-12))
        << "weight " << i;
  }
}

/// In one part and in two; `products` gradients must have gone to buffers.
void expect_fused_products(const FusedPart& part, size_t products) {
  const Run plain(part);
  run_backward(plain.starts, plain.gradients);

  const Run whole(part);
  const Sums sums(part);
  const WeightFusion fusion(whole.starts, sums.of(whole), /*defer=*/false);
  EXPECT_EQ(fusion.products(), products);
  run_backward(whole.starts, whole.gradients);
  expect_gradients(part, whole, sums, plain);

  const Run divided(part);
  const Sums late(part);
  WeightFusion deferred(divided.starts, late.of(divided), /*defer=*/true);
  SplitBackward split(divided.starts, divided.gradients, {divided.input});
  for (const auto& buffer : late.buffers) {
    EXPECT_TRUE(torch::equal(buffer, torch::ones_like(buffer))) << "added in the first part";
  }
  split.run_weights();
  deferred.run();
  expect_gradients(part, divided, late, plain);
}

torch::Tensor randn(at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble); }

/// A parameter: a leaf that requires a gradient.
torch::Tensor weight(at::IntArrayRef sizes) { return randn(sizes).requires_grad_(true); }

class WeightFusionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::set_num_threads(1);
    torch::manual_seed(7);
  }
};

TEST_F(WeightFusionTest, LinearLayersWithAndWithoutBias) {
  expect_fused_products({randn({5, 8}),
                         {weight({16, 8}), weight({16}), weight({4, 16})},
                         [](const torch::Tensor& x, const Tensors& w) {
                           return F::linear(torch::gelu(F::linear(x, w[0], w[1])), w[2]);
                         }},
                        2);
}

TEST_F(WeightFusionTest, BatchesOfSequences) {
  expect_fused_products({randn({2, 5, 8}),
                         {weight({16, 8}), weight({16}), weight({4, 16})},
                         [](const torch::Tensor& x, const Tensors& w) {
                           return F::linear(torch::tanh(F::linear(x, w[0], w[1])), w[2]);
                         }},
                        2);
}

TEST_F(WeightFusionTest, WeightThatIsNotTransposed) {
  expect_fused_products({randn({5, 8}),
                         {weight({8, 3})},
                         [](const torch::Tensor& x, const Tensors& w) { return x.mm(w[0]); }},
                        1);
}

TEST_F(WeightFusionTest, FactorOfAddmm) {
  expect_fused_products({randn({5, 8}),
                         {weight({8, 3}), weight({3})},
                         [](const torch::Tensor& x, const Tensors& w) {
                           return torch::addmm(w[1], x, w[0], /*beta=*/0.5, /*alpha=*/-2);
                         }},
                        1);
}

TEST_F(WeightFusionTest, WeightThatIsUsedInSeveralWays) {
  expect_fused_products({randn({8, 8}),
                         {weight({8, 8})},
                         [](const torch::Tensor& x, const Tensors& w) {
                           return F::linear(F::linear(x, w[0]) + w[0], w[0]) * w[0].sin();
                         }},
                        2);
}

TEST_F(WeightFusionTest, EmbeddingTiedToTheHead) {
  const auto tokens = torch::tensor({{1, 3, 3}, {0, 2, 3}});
  for (const int64_t padding : {-1, 3}) {
    expect_fused_products({randn({2, 3, 4}),
                           {weight({5, 4})},
                           [=](const torch::Tensor& x, const Tensors& w) {
                             return F::linear(torch::embedding(w[0], tokens, padding) + x, w[0]);
                           }},
                          2);
  }
}

TEST_F(WeightFusionTest, LeavesOtherWaysToWeightsAlone) {
  expect_fused_products(
      {randn({2, 3, 8, 8}),
       {weight({4, 3, 3, 3}), weight({4}), weight({8})},
       [](const torch::Tensor& x, const Tensors& w) {
         return torch::conv2d(x, w[0], w[1]).sum({2, 3}).matmul(w[2].view({4, 2}));
       }},
      0);
}

}  // namespace
}  // namespace smp::graph
