// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "checkpoint/apply.h"
#include "runtime/model.h"
#include "runtime/runtime.h"
#include "runtime/update/optimizer.h"
#include "smp/checkpoint_options.h"

namespace smp::runtime {

/// Gives what is expected of a checkpoint for `tensors` (`checkpoint::expectations`) the sizes of
/// the whole where parameters are divided. Internal.
void expect_whole(const Runtime& runtime, const std::vector<checkpoint::NamedTensor>& tensors,
                  std::vector<checkpoint::ExpectedTensor>& expected);

/// What another program's files are expected to hold for a model's tensors, or become for them: by
/// the names that the module itself gives them, with the sizes of the whole. Internal.
std::vector<checkpoint::ExpectedTensor> expected_by(const Runtime& runtime, const Model& model,
                                                    std::vector<checkpoint::NamedTensor> tensors);

/// Gives a model's tensor the values that `read` returns, of the whole and in its own type, if this
/// rank holds it, or its shard, or its part of what is divided; whoever will own a tensor that does
/// not exist yet reads it then. Internal.
void assign(const Runtime& runtime, const at::Tensor& tensor, std::function<at::Tensor()> read);

/// Copies values into models by `load`, after all ranks have agreed to: an error in it leaves the
/// models half loaded, and ends the world. Internal.
void load_values(Runtime& runtime, const std::function<void()>& load);

/// As `smp::load`, with the optimizer unless that is null.
LoadedRun load(const std::string& path, const Model& model, Optimizer* optimizer,
               const LoadOptions& options);

}  // namespace smp::runtime
