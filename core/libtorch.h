// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace smp::core {

/// Throws `ConfigError` when the libtorch that is loaded is not of the minor version that this was
/// compiled with. Versions are numbers as TORCH_ABI_VERSION is.
void check_libtorch(uint64_t compiled, uint64_t loaded);

/// The same of this library and the libtorch of this process.
void check_libtorch();

}  // namespace smp::core
