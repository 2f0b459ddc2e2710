// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "smp/detail/optimizer_traits.h"

namespace smp::optim {

/// Throws `UsageError` unless the optimizer is elementwise, as configuration parameter `key` asks
/// for where it is not `usual`.
void check_elementwise(const detail::Traits& traits, const char* key, const char* usual);

/// The same, and throws unless its state can be that of ranges of a parameter's elements.
void check_of_ranges(const detail::Traits& traits, const char* key, const char* usual);

}  // namespace smp::optim
