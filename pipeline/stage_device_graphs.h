// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "graph/device_graph.h"
#include "graph/memory_layout.h"
#include "graph/random.h"
#include "pipeline/action.h"
#include "pipeline/stage.h"

namespace smp::pipeline {

/// A tensor that enters a captured computation or leaves it: how it lies, and where.
class CapturedTensor {
 public:
  /// One that lies like this, without memory.
  explicit CapturedTensor(const at::Tensor& like);
  /// One that lies like this, and there. Does not own the memory, which may be other tensors' when
  /// the computation is not at it.
  static CapturedTensor at(const at::Tensor& tensor);

  /// New memory for it. The holder of the result owns it.
  at::Tensor allocate();

  /// Whether kernels could not tell one from the other.
  bool lies_like(const CapturedTensor& other) const;
  /// Copies the tensor's elements to it.
  void write(const at::Tensor& tensor) const;
  /// It, where it lies.
  const at::Tensor& get() const { return tensor_; }
  at::Tensor copy() const;

 private:
  std::optional<graph::MemoryLayout>
      layout_;  // null: the tensor is undefined, or zeros without memory
  at::Tensor tensor_;
};

/// The computations of one stage as device graphs, each of which may serve several microbatches.
/// Inputs are copied to their memory and results from there, but for gradients of parameters, which
/// their receiver has to copy.
class StageDeviceGraphs {
 public:
  /// For the computations of a step's microbatches. The stage outlives it.
  StageDeviceGraphs(Stage& stage, int microbatches);

  /// Before a computation of the stage's: notes the layouts of its inputs.
  void note(const Action& action, const std::vector<at::Tensor>& inputs);

  /// Captures a computation that was noted. Those of a step in the order of its actions.
  void capture(const Action& action, graph::DeviceGraphCapture& capture);

  /// Whether two microbatches' inputs of a computation were noted to lie alike.
  bool are_noted_alike(const Action& action, const Action& other) const;
  /// Launches for a microbatch another one's device graphs from now on, all of which are captured.
  void serve(int microbatch, int captured) { server_[microbatch] = captured; }

  /// Does the same as `Stage::forward`. False, and nothing is done, where inputs lie otherwise than
  /// before: the microbatch is the stage's, then.
  bool forward(const Action& action, const std::vector<at::Tensor>& inputs,
               const graph::RandomKey& key, StepResults& results);
  /// Does the same as `Stage::backward` and its two parts. False if the microbatch is the stage's.
  bool backward(const Action& action, const graph::RandomKey& key, GradientSums& sums);

  Stage& stage() const { return stage_; }

  /// Forgets captures and the casts that they read, and not notes.
  void forget();

  /// Whether parameters and buffers lie where they lay when they were captured.
  bool are_valid() const { return stage_.addresses() == addresses_; }

 private:
  using Inputs = std::vector<at::Tensor>;
  using CapturedMessage = std::vector<CapturedTensor>;
  struct Computation {
    std::vector<CapturedTensor> inputs;  // those that the stage reads
    std::vector<CapturedMessage> arriving;
    // Once it is captured.
    graph::CapturedWork work;
    std::vector<CapturedTensor> losses;
    std::vector<std::pair<int, CapturedTensor>> outputs;               // outputs by position
    std::vector<std::pair<graph::ValueId, CapturedTensor>> gradients;  // gradients by parameter
    std::vector<CapturedMessage> leaving;
  };

  Computation& of(const Action& action);
  void forget_servers();
  std::vector<Message*> messages(const Action& action, bool arriving);
  std::vector<Message*> arriving(const Action& action) { return messages(action, true); }
  std::vector<Message*> leaving(const Action& action) { return messages(action, false); }
  bool enters_as_noted(const Action& action, const Inputs& inputs);
  Inputs enter(const Action& action, Computation& computation);
  void run(const Action& action, const Inputs& inputs, Computation& computation,
           std::vector<at::Tensor>& held);
  void launch(const Action& action, const Inputs& inputs, const graph::RandomKey& key);

  Stage& stage_;
  std::vector<size_t> inputs_;  // positions of the step's inputs that the stage reads
  size_t input_count_ = 0;      // inputs of the step
  std::map<std::pair<Action::Kind, int>, Computation> computations_;  // computations by microbatch
  std::vector<int> server_;      // microbatch whose graphs are launched, by microbatch
  std::vector<bool> is_stages_;  // microbatches of the stage
  std::vector<const void*> addresses_;
};

}  // namespace smp::pipeline
