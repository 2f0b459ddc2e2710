// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "graph/graph.h"
#include "graph/saved_tensors.h"

namespace smp::graph {

/// Sees to it that parameters whose data is not always there are there while they are read:
/// operators in the forward pass (and again in the backward pass, see `CheckpointedSegment`), and
/// the functions of a backward pass that have saved them. Called by the threads that run forwards
/// and backwards, one at a time; calls nest.
class ParameterResidency {
 public:
  virtual ~ParameterResidency() = default;

  enum class Pass { kForward, kBackward };

  /// A pass of a microbatch begins, in which the functions below are called; and has ended.
  virtual void begin(Pass pass, int microbatch) = 0;
  virtual void end(Pass pass, int microbatch) = 0;

  /// Whether operator `index` of the graph reads a parameter whose data may be away. `before` and
  /// `after` are called for such operators only.
  virtual bool concerns(int index) const = 0;

  /// Operator `index` is about to run: when this returns, it can read its parameters.
  virtual void before(int index) = 0;
  /// It has run, or has failed.
  virtual void after(int index) noexcept = 0;

  /// A tensor that may lie on such a parameter is about to be read: by a function of the backward
  /// pass that has saved it, or because the step returns it.
  virtual void before_read(const at::Tensor& tensor) = 0;
  /// Called when its reader has let go of it.
  virtual void after_read(const at::Tensor& tensor) noexcept = 0;
};

/// Keeps saved tensors as autograd does, and says when a backward pass reads them.
class ResidentTensors final : public SavedTensorKeeper {
 public:
  explicit ResidentTensors(std::shared_ptr<ParameterResidency> residency)
      : residency_(std::move(residency)) {}

  size_t pack(const at::Tensor& tensor) override;
  /// Throws `UsageError` if the tensor was written since it was saved.
  at::Tensor unpack(size_t number) override;
  void release(size_t number) noexcept override;

 private:
  struct Saved {
    at::Tensor tensor;
    c10::VariableVersion counter;
    uint32_t version;
    bool is_read = false;
  };

  const std::shared_ptr<ParameterResidency> residency_;
  std::vector<Saved> saved_;
};

}  // namespace smp::graph
