// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tests/nn/rewrite/harness.h"

/// Functions that rules_test divides, and the operators that communicate then.
namespace smp::nn::rewrite::testing {

using torch::Tensor;

constexpr int64_t kBatch = 3, kLength = 5, kWidth = 8, kHidden = 48;

inline torch::TensorOptions doubles() { return torch::kDouble; }

/// Parameters for every rule to have gradients to get right.
struct WeightsImpl : torch::nn::Module {
  WeightsImpl() {
    torch::manual_seed(3);
    const auto add = [this](const char* name, std::vector<int64_t> sizes) {
      return register_parameter(name, torch::randn(sizes, doubles()) * 0.5);
    };
    scale = add("scale", {1});
    up = add("up", {kHidden, kWidth});
    up_bias = add("up_bias", {kHidden});
    other_up = add("other_up", {kHidden, kWidth});
    down = add("down", {kWidth, kHidden});
    down_bias = add("down_bias", {kWidth});
    right = add("right", {kWidth, kHidden});
    left = add("left", {kHidden, kWidth});
    row = add("row", {kHidden});
    of_head = add("of_head", {4});
    table = add("table", {16, kWidth});
    kernel = add("kernel", {8, 4, 3});
    kernel_bias = add("kernel_bias", {8});
    next_kernel = add("next_kernel", {4, 8, 1});
    next_bias = add("next_bias", {4});
    channels = add("channels", {8});
  }
  Tensor scale, up, up_bias, other_up, down, down_bias, right, left, row, of_head, table, kernel,
      kernel_bias, next_kernel, next_bias, channels;
};
TORCH_MODULE(Weights);

using Body = std::function<Tensor(Weights&, const Tensors&)>;

struct Case {
  std::string name;
  std::map<std::string, std::pair<int, int>> fixed;  ///< dimension and blocks by parameter
  Body body;
  std::string expected;  ///< operators that communicate, on two ranks
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

/// Tokens are the second input, numbers the first and the third.
inline Tensors inputs() {
  torch::manual_seed(9);
  return {torch::randn({kBatch, kLength, kWidth}, doubles()), torch::randint(16, {kBatch, kLength}),
          torch::randn({kBatch, kLength, kHidden}, doubles()),
          torch::randn({kBatch, 4, 6}, doubles())};
}

using OnHidden = std::function<Tensor(Weights&, Tensor)>;

/// `body` of a column-divided layer's result, [3, 5, 48] in `blocks` blocks.
inline Case on_hidden(std::string name, int blocks, OnHidden body, std::string expected) {
  return {std::move(name),
          {{"up", {0, blocks}}},
          [body](Weights& w, const Tensors& in) {
            return body(w, torch::linear(in[0] * w->scale, w->up, w->up_bias));
          },
          std::move(expected)};
}

/// A value that is divided to the end is joined for the loss and for the output.
inline constexpr char kDivided[] = "copy gather gather";
/// A value that an operator needs whole.
inline constexpr char kJoined[] = "copy gather";

inline Tensor by_head(const Tensor& x) {
  return x.view({kBatch, kLength, 4, kHidden / 4}).transpose(1, 2);
}

/// [3, 4 heads, 5, 4] of a fused projection.
inline std::vector<Tensor> heads_of(const Tensor& x) {
  const auto parts = x.view({kBatch, kLength, 3, 4, 4}).permute({2, 0, 3, 1, 4});
  return {parts[0], parts[1], parts[2]};
}

/// Products with divided weights and related operators: convolutions and embeddings.
std::vector<Case> product_cases();

}  // namespace smp::nn::rewrite::testing
