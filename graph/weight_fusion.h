// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>
#include <vector>

#include "graph/autograd_entry.h"
#include "graph/graph.h"

namespace smp::graph {

/// The number of operators that compute with the storage of each alias set; those that show it as
/// another tensor do not. The gradients of several are added in one order wherever they run, but
/// rounded by which of them run together if they add to the sum themselves: a weight is fused if it
/// has one use.
std::vector<int> uses_of_storages(const Graph& graph);

/// Where the gradient of a weight is summed.
struct WeightBuffer {
  GradientSinkPtr weight;
  /// Gives a tensor of its sizes and dtype; called when something is about to be added.
  std::function<at::Tensor()> buffer;
};

/// Gradients of weights that are added to their buffers by the matrix product that computes them,
/// without a tensor for each and a pass to add it ("gradient accumulation fusion" of Megatron-LM).
/// That rounds once where computing and then adding rounds twice.
///
/// It changes the autograd graph of one microbatch: the ways to the weights behind `addmm`, `mm`
/// (with the weight or its transpose) and `embedding` are cut, and where the backward pass comes by
/// them it adds to the buffer. Gradients that reach a weight in other ways still go to its sink.
class WeightFusion {
 public:
  /// Takes in the graph behind `starts`. With `defer`, the backward pass keeps the operands of the
  /// products, and `run` computes them: for a backward in two parts.
  WeightFusion(const std::vector<torch::autograd::Edge>& starts,
               const std::vector<WeightBuffer>& weights, bool defer);

  /// Computes the deferred products.
  void run();

  /// How many products write to buffers.
  size_t products() const { return products_; }

 private:
  using Products = std::vector<std::function<void()>>;

  std::shared_ptr<Products> deferred_;  // shared with the hooks; null if nothing is deferred
  size_t products_ = 0;
};

}  // namespace smp::graph
