// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "nn/rewrite/layout.h"

/// Calls of which legality_test tries every layout.
namespace smp::nn::rewrite::testing {

using Stack = torch::jit::Stack;
using LayoutList = std::vector<Layout>;

/// Small integers, none of them zero.
torch::Tensor integers(std::vector<int64_t> sizes);

struct Sample {
  std::string name;
  std::string overload;
  Stack whole;
  /// Changes the numbers of a call to a rank's, given the layouts of its tensors and results.
  std::function<void(Stack&, const LayoutList&, const LayoutList&)> localize;
  /// False: some refused layouts would give the right numbers, too.
  bool is_exact = true;
  /// The factor of sums over ranks with parts: means are divided later (`check_layouts`).
  int scale = 1;
  /// The function of the whole, if the operator is one of ours.
  std::function<std::vector<torch::Tensor>(const std::vector<torch::Tensor>&)> of_whole = nullptr;
};

// All sizes are multiples of the ranks.
std::vector<Sample> elementwise_samples(int64_t ranks);
std::vector<Sample> reduction_samples(int64_t ranks);
std::vector<Sample> shape_samples(int64_t ranks);
std::vector<Sample> layer_samples(int64_t ranks);
std::vector<Sample> product_samples(int64_t ranks);
/// Operators that communicate stand for the tensor that they are given, or for those of libtorch.
std::vector<Sample> collective_samples(int64_t ranks);

}  // namespace smp::nn::rewrite::testing
