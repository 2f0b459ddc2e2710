// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "smp/nn/parameter_split.h"

namespace smp::nn {

/// Throws `UsageError` unless `size`, the option `name` of module `module`, can be divided in
/// `blocks` equal blocks, each among `ranks` ranks.
void check_divides(const char* module, const char* name, int64_t size, int ranks,
                   int64_t blocks = 1);

/// Gives `part`, rank `rank`'s of a tensor divided by `split`, the values that `draw` gives the
/// whole: the same as in one process, and so are the generator's next numbers.
void draw_part(const at::Tensor& part, const ParameterSplit& split, int rank,
               const std::function<void(at::Tensor)>& draw);

/// Draws weight [out, in] and bias [out] (or none) of a linear layer, as divided by the splits, as
/// `torch::nn::Linear` draws them; the weight from a normal distribution where `std` is given.
void draw_linear(const at::Tensor& weight, const ParameterSplit& of_weight, const at::Tensor& bias,
                 const ParameterSplit& of_bias, int rank, std::optional<double> std);

}  // namespace smp::nn
