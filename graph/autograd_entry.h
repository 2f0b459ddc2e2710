// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/node.h"

namespace smp::graph {

/// The gradient itself, or one that an embedding computed as a sparse tensor, with the same bits.
/// Gradients travel between stages, and are summed, as dense tensors.
at::Tensor dense(at::Tensor gradient);

/// The end of a stage's autograd graph: receives the gradient of a tensor that entered the stage
/// (a parameter, or a value from another stage), already summed over all its uses in the stage.
class GradientSink final : public torch::autograd::Node {
 public:
  /// Runs sinks first of all nodes that are ready, as libtorch's backward pass does.
  GradientSink() : Node(/*sequence_nr=*/UINT64_MAX) {}

  /// The gradient of the last backward pass; undefined if none reached the tensor.
  at::Tensor gradient;
  /// If set, is given the gradient as soon as it is there instead.
  std::function<void(at::Tensor gradient)> take;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    at::Tensor received = dense(std::move(gradients[0]));
    if (take == nullptr) {
      gradient = std::move(received);
    } else if (received.defined()) {
      take(std::move(received));
    }
    return {};
  }
  std::string name() const override { return "smp::GradientSink"; }
};

using GradientSinkPtr = core::NodePtrTo<GradientSink>;

/// An alias of `data` whose gradient goes to `sink` (which may be null for a tensor that needs
/// none). A parameter's is a leaf, which autocast casts once for all its uses, and which the sink
/// has to outlive. Others are none, so that in-place operators on them are legal, as they are in
/// one process.
at::Tensor enter(const at::Tensor& data, const GradientSinkPtr& sink);

/// An alias of `data` that requires a gradient and from which none goes back, as from a view made
/// under no_grad: operators save nothing for the gradient.
at::Tensor enter_unlinked(const at::Tensor& data);

/// A view of a tensor that entered. A view in one process is one here, too, if it is written:
/// autograd lays out its gradient anew.
at::Tensor as_view(const at::Tensor& entered);

/// Where a backward pass starts in `tensor`'s history; not valid if it has none. Holds the
/// history, not the data.
torch::autograd::Edge start_of_backward(const at::Tensor& tensor);

/// Runs backward from `starts` with `gradients` into the sinks, and frees the history. Starts that
/// are not valid or have an undefined gradient are skipped.
void run_backward(const std::vector<torch::autograd::Edge>& starts,
                  const std::vector<at::Tensor>& gradients);

}  // namespace smp::graph
