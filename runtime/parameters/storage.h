// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace smp::runtime {

/// False for a parameter that another rank has, and for a parameter or buffer that was made under
/// delayed parameter initialization and has no data yet.
bool has_data(const at::Tensor& tensor);

/// Takes the data of a storage away for as long as step functions are shown tensors on it, which
/// shall not read any.
void hide_data(c10::StorageImpl& storage);

/// Must be called for a parameter that gets other sizes or another device: an earlier backward pass
/// left an accumulator of its gradient that knows the old ones.
void forget_grad_accumulator(const at::Tensor& tensor);

/// Gives a tensor without data storage again; the content is undefined.
void allocate_data(const at::Tensor& tensor);

}  // namespace smp::runtime
