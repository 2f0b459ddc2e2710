// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "checkpoint/apply.h"
#include "runtime/model.h"
#include "smp/checkpoint_options.h"
#include "smp/checkpoint_parts.h"

namespace smp::runtime {

/// The tensors that another program's files are expected to hold for a model's tensors, or that the
/// latter become for them: by the names that the module itself gives them, with the sizes of the
/// whole. Internal.
std::vector<checkpoint::ExpectedTensor> expected_by(const ParameterTable& table, const Model& model,
                                                    std::vector<checkpoint::NamedTensor> tensors);

/// Loads world rank `rank`'s share (all, its part or its shard) of the whole value that `read`
/// returns into a parameter or buffer, in its type. For a tensor not yet materialized, its future
/// owner calls `read` when it is. Internal.
void assign(const ParameterTable::Entry& entry, int rank, std::function<at::Tensor()> read);

/// Copies values into models by `load`, after all ranks have agreed to: an error in it leaves the
/// models half loaded, and ends the world. Internal.
void load_values(Runtime& runtime, const std::function<void()>& load);

/// Does the work of `smp::load`.
LoadedRun load(const std::string& path, const CheckpointParts& parts, const LoadOptions& options);

}  // namespace smp::runtime
