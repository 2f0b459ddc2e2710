// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/checkpoint_source.h"

namespace smp::tools {

/// How a model is written to another place.
struct Conversion {
  std::optional<at::ScalarType> dtype = {};  ///< type of floating point tensors; none: as they are
  bool model_only = false;                   ///< leave the optimizer out
  int64_t shards = 1;                        ///< files, for a checkpoint
};

/// Writes `source` to `output`: by its ending a safetensors file (".safetensors"), a state
/// dictionary for `torch.load` (".pt"), both with the model alone, or else a checkpoint. With a
/// wider `dtype`, values come from master weights where there are any. Throws CheckpointError.
void convert(CheckpointSource& source, const std::string& output, const Conversion& conversion);

/// True for the name of a safetensors file or a state dictionary; others are checkpoints' folders.
bool is_one_file(const std::string& output);

/// How two checkpoints or files differ, a line for each tensor that does: names, types, shapes,
/// the largest absolute difference and how many elements have other bits. Empty if they hold the
/// same.
std::vector<std::string> differences(CheckpointSource& a, CheckpointSource& b);

}  // namespace smp::tools
