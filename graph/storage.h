// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/StorageImpl.h>

#include <string>

namespace smp::graph {

/// Takes the memory of a storage away: it has 0 bytes then, and code that reads or writes its data
/// throws `message`. Tensors on it keep identity, sizes and strides. `mark` replaces the data
/// pointer; it must point to no data, and its context is freed with the storage or by `give_data`.
void take_data(c10::StorageImpl& storage, c10::DataPtr mark, const std::string& message);

/// Gives a storage without memory that of `from`, which has none afterwards. Tensors on `storage`
/// can be used as if it had been there from the start.
void give_data(c10::StorageImpl& storage, c10::StorageImpl& from);

}  // namespace smp::graph
