// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "core/public_call.h"
#include "dp/step_gradients.h"
#include "graph/graph.h"

namespace smp::pipeline {

/// Gradients of parameters, each once.
using Gradients = std::vector<std::pair<graph::ValueId, at::Tensor>>;

/// Where the gradients of this rank's parameters go: each to a sum of `dp`, whose buckets are
/// reduced in one order as soon as their parameters are complete.
///
/// Belongs to one thread at a time. Gradients of a device come from a thread of libtorch's, while
/// the one that runs the step waits for it.
class GradientSums {
 public:
  struct Place {
    dp::StepGradients* sums = nullptr;    ///< null: the value is no parameter with a sum
    size_t index = 0;                     ///< index of the parameter there
    dp::WholeGradients* whole = nullptr;  ///< `sums`, if the parameter is whole
  };

  /// Nothing has a sum.
  GradientSums() = default;
  /// `all`, which outlive it, in the order in which they reduce; `places` by value of the graph.
  /// For steps of `microbatches` microbatches. `fuses`: matrix products add to the sums, too
  /// (`buffer`).
  GradientSums(std::vector<dp::StepGradients*> all, std::vector<Place> places, int microbatches,
               bool fuses);

  const std::vector<dp::StepGradients*>& all() const { return all_; }

  /// Says before a step that these parameters may get gradients in it: their buckets start when
  /// the last microbatch has given them one, or with `complete`.
  void arm(const std::vector<graph::ValueId>& parameters);
  /// Says that these get no more, which some may have got none at all.
  void complete(const std::vector<graph::ValueId>& parameters);

  /// Adds the gradient of one microbatch, whose memory may become the sum's if the caller gives it
  /// away.
  void add(graph::ValueId parameter, int microbatch, at::Tensor gradient);
  /// The same for several parameters. The memory of the gradients stays the caller's.
  void add(int microbatch, const Gradients& gradients);

  /// Whether the products of a backward may be added to `buffer`, if the parameter is of float32 or
  /// float64: a tensor of its sizes and dtype, asked for only when something is added.
  bool fuses() const { return fuses_; }
  at::Tensor buffer(graph::ValueId parameter, int microbatch) const;

 private:
  const Place& at(graph::ValueId parameter) const;
  bool is_complete_with(int microbatch) const;
  void start_reductions();

  std::vector<dp::StepGradients*> all_;
  std::vector<Place> places_;
  int microbatches_ = 0;
  bool fuses_ = false;
  core::PublicCall caller_;  // caller of the step that runs
};

}  // namespace smp::pipeline
