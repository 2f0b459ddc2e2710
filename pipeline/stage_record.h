// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "graph/replay.h"

namespace smp::pipeline {

struct StageProgram;
struct StageState;
struct StageTensors;

/// A hash of one tensor that a stage computes for a microbatch (`graph::hash_content`).
struct TensorHash {
  enum class Kind : int32_t {
    kResult,             ///< the `number`-th result of operator `id`
    kBuffer,             ///< buffer `id`, which the stage writes, after the forward
    kParameterGradient,  ///< gradient of parameter `id`
    kGradient,           ///< the one that goes back to the stage that value `id` came from
  };
  Kind kind = Kind::kResult;
  int32_t id = 0;
  int64_t number = 0;
  uint64_t hash = 0;

  /// Whether both say something of the same tensor.
  bool is_of(const TensorHash& other) const {
    return kind == other.kind && id == other.id && number == other.number;
  }
};

/// The results of a stage for one microbatch. Those that are others' memory, or uninitialised, are
/// left out (`graph::computes`), and parameter gradients where products add to the sums themselves
/// (`GradientSums::fuses`).
struct StageRecord {
  /// Results in the order in which operators ran, buffers, then gradients.
  std::vector<TensorHash> hashes;

  /// Whether `given` is wanted.
  bool keeps_given = false;
  /// The tensors that the stage was given to compute from, as they were then
  /// (`StageProgram::given`). Those that no operator writes before the step ends are no copies.
  std::vector<at::Tensor> given;
};

/// The records of a rank's stages in a step: by stage and microbatch.
using StepRecords = std::map<std::pair<int, int>, StageRecord>;

// Each of these adds to the record of a microbatch, if it has one.

/// All that it was given, when that is in the environment and no operator has run.
void record_given(const StageProgram& program, const StageTensors& tensors, StageState& state);
/// The gradients that it was given, before they are moved.
void record_given_gradients(const StageProgram& program, StageState& state);
/// Shows the results of its operators to the record. Null: it has none.
graph::ResultObserver result_observer(const StageProgram& program, StageState& state);
/// The buffers that it has written.
void record_buffers(const StageProgram& program, const StageTensors& tensors, StageState& state);
void record_gradient(graph::ValueId parameter, const at::Tensor& gradient, const StageState& state);
/// The gradients that go back, when they are in their messages.
void record_gradients(const StageProgram& program, const StageState& state);

}  // namespace smp::pipeline
