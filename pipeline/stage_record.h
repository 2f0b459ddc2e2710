// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace smp::pipeline {

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

}  // namespace smp::pipeline
