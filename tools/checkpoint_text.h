// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "tools/checkpoint_source.h"

namespace smp::tools {

/// One line for each checkpoint in `folder`, the oldest first: name, step, size, content. The
/// newest is marked. Throws CheckpointError.
std::string list_checkpoints(const std::string& folder);

/// The content of a checkpoint or safetensors file; with `tensors` each one's name, type, shape and
/// file.
nlohmann::ordered_json describe(CheckpointSource& source, bool tensors);
std::string to_text(const nlohmann::ordered_json& description);

}  // namespace smp::tools
