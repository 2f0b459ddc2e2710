// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp::runtime {

/// See `smp::grad_norm`, `smp::clip_grad_norm_` and `smp::clip_grad_value_`.
at::Tensor grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2);
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                       double norm_type = 2, bool error_if_nonfinite = false);
void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);

}  // namespace smp::runtime
