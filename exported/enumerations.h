// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "core/json_reader.h"

/// Enumerations, whose numbers in exported programs are not libtorch's.
namespace smp::exported {

at::ScalarType read_dtype(const core::JsonReader& place);
at::Layout read_layout(const core::JsonReader& place);
at::MemoryFormat read_memory_format(const core::JsonReader& place);
at::Device read_device(const core::JsonReader& place);

/// The number of a type in exported programs; nothing for one that they do not have.
std::optional<int64_t> number_of(at::ScalarType dtype);
std::optional<int64_t> number_of(at::MemoryFormat format);
/// The number of the layout of dense tensors.
constexpr int64_t kDenseLayout = 7;

}  // namespace smp::exported
