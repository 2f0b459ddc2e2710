// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/version.h>

#include "smp/export.h"

/// The version of these headers, as semantic versioning has it (https://semver.org).
#define SMP_VERSION_MAJOR 0
#define SMP_VERSION_MINOR 2
#define SMP_VERSION_PATCH 0

/// The minor versions of libtorch that smp's tests were run with. The parts that it uses beneath
/// libtorch's public interface (dispatch keys, autograd's nodes, c10d) may change with any other.
#if !defined(SMP_UNTESTED_LIBTORCH) && \
    !(TORCH_VERSION_MAJOR == 2 &&      \
      (TORCH_VERSION_MINOR == 11 || TORCH_VERSION_MINOR == 14 || TORCH_VERSION_MINOR == 15))
#error \
    "smp 0.2 was tested with libtorch 2.11, 2.14 and 2.15, and this is another version. Use one of those, or define SMP_UNTESTED_LIBTORCH and run smp's tests with yours."
#endif

namespace smp {

/// The version of the library that is loaded: "0.2.0".
SMP_API const char* version();

/// The version of libtorch that it was compiled with: "2.11.0". It works with the other patch
/// releases of that minor version; `init` throws a `ConfigError` where another one is loaded.
SMP_API const char* libtorch_version();

}  // namespace smp
