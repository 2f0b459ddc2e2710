// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace smp::core {

/// What is wrong if a library that was compiled with one libtorch runs with another, both given as
/// TORCH_ABI_VERSION; empty if nothing is.
std::string why_not_with(uint64_t compiled, uint64_t loaded);

/// Throws `ConfigError` when the libtorch that is loaded is not of the minor version that this was
/// compiled with.
void check_libtorch();

}  // namespace smp::core
