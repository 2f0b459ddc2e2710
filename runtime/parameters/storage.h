// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace smp::runtime {

/// False for a parameter or buffer whose storage was released with `release_data`, or that was made
/// under delayed parameter initialization and has no data yet.
bool has_data(const at::Tensor& tensor);

/// Frees the storage of a parameter that another rank owns. Identity, sizes and strides stay, so
/// the module's members, the optimizer and code such as `weight.size(0)` go on working. Code that
/// reads or writes its data throws.
void release_data(const at::Tensor& tensor);

/// Gives a tensor that was released storage again; the content is undefined.
void allocate_data(const at::Tensor& tensor);

}  // namespace smp::runtime
