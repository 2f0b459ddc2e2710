// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include "exported/json_place.h"

/// Enumerations, whose numbers in exported programs are not libtorch's.
namespace smp::exported {

at::ScalarType read_dtype(const JsonPlace& place);
at::Layout read_layout(const JsonPlace& place);
at::MemoryFormat read_memory_format(const JsonPlace& place);
at::Device read_device(const JsonPlace& place);

}  // namespace smp::exported
