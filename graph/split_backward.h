// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <vector>

#include "graph/autograd_entry.h"
#include "graph/graph.h"

namespace smp::graph {

/// A backward pass in two parts: first the gradients that other stages wait for, later those of the
/// weights (Qi et al., "Zero Bubble Pipeline Parallelism", 2023). Both parts together run each
/// backward formula with the same arguments as one pass would and add up in the same order, so the
/// gradients are the same to the bit.
///
/// It is the autograd graph that is divided, not the program, so any operator may take part. A
/// *divided* function is one that leads to an input as well as to weights: the first part asks it
/// for the gradients on the way to inputs only and keeps the gradient that it was given; the second
/// part starts there. Only functions whose formulas for the two have nothing in common (matrix
/// products, also of gathered inputs, convolutions, sums, products, layer norm) are divided;
/// gradients that others send to weights are computed in the first part and kept. Where the sum of
/// a gradient would be divided, or libtorch cannot run a part, the first part is the whole.
class SplitBackward {
 public:
  /// Runs the first part from `starts` with `gradients` (as `run_backward` does) and gives the
  /// sinks in `inputs` their gradients. Memory that the second part does not need is freed as soon
  /// as the caller lets go of `starts`.
  SplitBackward(const std::vector<torch::autograd::Edge>& starts,
                const std::vector<at::Tensor>& gradients,
                const std::vector<GradientSinkPtr>& inputs);

  /// Runs the second part, which gives all other sinks their gradients, and frees the history. To
  /// be called once.
  void run_weights();

  /// Bytes of the gradients kept for the second part.
  int64_t kept_bytes() const;

 private:
  std::vector<torch::autograd::Edge> starts_;  // starts of the second part
  std::vector<at::Tensor> gradients_;
};

/// The positions of the arguments that an operator saves for its gradients, if `SplitBackward` can
/// divide it; null if it cannot.
const std::vector<size_t>* saved_arguments_if_divisible(const Operator& op);

}  // namespace smp::graph
