// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp::core {

/// The numbers of tensors of one element each. Those that lie on a device come in one copy, for
/// which the host waits.
std::vector<double> read_numbers(const std::vector<at::Tensor>& tensors);

}  // namespace smp::core
