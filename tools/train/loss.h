// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>

#include "tools/train/options.h"

namespace smp::tools::train {

/// The tensor that a model's result has under a key or a number; with an empty `output` the result
/// itself. Throws `UsageError` that describes the result.
at::Tensor pick_output(const c10::IValue& result, const std::string& output);

/// The target as the loss takes it: for cross_entropy labels as int64, which may have been integers
/// of any type. Throws `UsageError` for others.
at::Tensor as_target(const LossOptions& options, const at::Tensor& target);

/// Whether each number of such a target counts.
at::Tensor counted(const LossOptions& options, const at::Tensor& target);

/// The sum of the losses of all numbers of such a target that count. Throws `UsageError` for
/// another shape than the output's, of which cross_entropy leaves out the classes. Not for
/// LossKind::kOutput.
at::Tensor sum_of_losses(const LossOptions& options, const at::Tensor& output,
                         const at::Tensor& target);

}  // namespace smp::tools::train
