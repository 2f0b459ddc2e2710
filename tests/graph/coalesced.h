// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "graph/coalesce.h"
#include "nn/rewrite/batch_axis.h"
#include "tests/graph/harness.h"

/// Several microbatches as one: the results and gradients of a coalesced graph, against plain eager
/// code that runs one microbatch after the other, in float64.
namespace smp::graph::testing {

constexpr int kFactor = 3;
constexpr int64_t kSamples = 2;  // samples of a microbatch
constexpr int64_t kAll = kFactor * kSamples;
constexpr double kTolerance = 1e-12;

inline torch::TensorOptions doubles() { return torch::kDouble; }

/// Parameters to mix with the samples, so that every rule has a gradient to get right.
struct WeightsImpl : torch::nn::Module {
  WeightsImpl() {
    torch::manual_seed(3);
    scale = register_parameter("scale", torch::rand({1}, doubles()) + 0.5);
    row = register_parameter("row", torch::randn({4}, doubles()));
    square = register_parameter("square", torch::randn({4, 4}, doubles()));
    table = register_parameter("table", torch::randn({7, 4}, doubles()));
    kernel = register_parameter("kernel", torch::randn({3, 4, 3}, doubles()));
    image_kernel = register_parameter("image_kernel", torch::randn({2, 3, 3, 3}, doubles()));
    mean = register_buffer("mean", torch::randn({4}, doubles()));
    variance = register_buffer("variance", torch::rand({4}, doubles()) + 0.5);
  }
  torch::Tensor scale, row, square, table, kernel, image_kernel, mean, variance;
};
TORCH_MODULE(Weights);

using Body = std::function<torch::Tensor(Weights&, const Tensors&)>;

struct Captured {
  Weights weights;
  TensorTable table = table_of(*weights);
  std::unique_ptr<Graph> one, many;
  BatchAxes axes;
};

inline Tensors slice(const Tensors& inputs, int part, const std::vector<int64_t>& axes) {
  Tensors result;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const int64_t size = inputs[i].size(axes[i]) / kFactor;
    result.push_back(inputs[i].narrow(axes[i], part * size, size).clone());
  }
  return result;
}

/// Captures the step on one microbatch and on all, and finds out the operators that may be
/// coalesced.
inline Captured capture(const Body& body, const Tensors& inputs, const std::vector<int64_t>& axes) {
  Captured result;
  const Function step = [&](const Tensors& tensors) {
    return Tensors{body(result.weights, tensors)};
  };
  result.one = trace(result.table, slice(inputs, 0, axes), step, false).recorded;
  result.many = trace(result.table, inputs, step, false).recorded;
  result.axes = nn::rewrite::find_batch_axes(*result.one, *result.many, kFactor);
  return result;
}

/// How many operators of that name run once, and how many for each microbatch.
inline std::pair<int, int> counts(const Captured& captured, const std::string& name) {
  int whole = 0, part = 0;
  for (size_t i = 0; i < captured.axes.role.size(); ++i) {
    if (captured.one->operators[i].handle.operator_name().name != name) continue;
    (captured.axes.role[i] == BatchRole::kPart ? part : whole) += 1;
  }
  return {whole, part};
}

inline std::vector<int64_t> first_axes(const Tensors& inputs) {
  return std::vector<int64_t>(inputs.size(), 0);
}

/// The step that trains on the results of `body`: the loss of a microbatch is no sum over samples.
inline Body training(const Body& body) {
  return [body](Weights& weights, const Tensors& inputs) {
    const auto result = body(weights, inputs);
    testing::backward(result.square().norm().sqrt());
    return result;
  };
}

/// Compares the coalesced graph with the microbatches one by one: results, and the sums of the
/// gradients.
inline void expect_equals_microbatches(const Body& body, const Tensors& inputs,
                                       const std::vector<int64_t>& axes, Captured& captured) {
  ASSERT_EQ(captured.axes.refusal, std::nullopt);
  const Coalesced coalesced = coalesce(*captured.one, *captured.many, captured.axes, kFactor);
  const Replayed got = replay(coalesced.graph, captured.table, inputs);
  captured.weights->zero_grad();
  ASSERT_EQ(got.outputs.size(), size_t{kFactor});
  for (int part = 0; part < kFactor; ++part) {
    const auto expected = body(captured.weights, slice(inputs, part, axes));
    EXPECT_EQ(got.outputs[part].sizes(), expected.sizes());
    EXPECT_TRUE(torch::allclose(got.outputs[part], expected, kTolerance, kTolerance))
        << "microbatch " << part << "\n"
        << coalesced.graph.to_string();
  }
  for (const auto& item : captured.weights->named_parameters()) {
    const auto expected = item.value().grad();
    const auto gradient =
        got.gradients.count(item.key()) > 0 ? got.gradients.at(item.key()) : torch::Tensor();
    ASSERT_EQ(gradient.defined(), expected.defined()) << item.key();
    if (!expected.defined()) continue;
    EXPECT_TRUE(torch::allclose(gradient, expected, kTolerance, kTolerance))
        << "gradient of " << item.key() << "\n"
        << coalesced.graph.to_string();
  }
}

}  // namespace smp::graph::testing
