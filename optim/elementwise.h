// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "smp/detail/optimizer_traits.h"

namespace smp::optim {

/// Throws `UsageError` unless the optimizer is elementwise, as configuration parameter `key` asks
/// for where it is not `usual`.
void check_elementwise(const detail::Elementwise& elementwise, const char* key, const char* usual);

}  // namespace smp::optim
