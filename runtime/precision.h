// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "smp/config.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace smp::runtime {

/// The type that the configuration's `fp16` or `bf16` gives parameters; none without.
std::optional<at::ScalarType> half_type(const Config& config);

/// Gives the module's floating point parameters and buffers another type, in place: tensors keep
/// their identity. Those that were made under `model_creation` stay without data.
void convert_module(const torch::nn::Module& module, at::ScalarType type);

}  // namespace smp::runtime
