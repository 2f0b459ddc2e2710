// SPDX-License-Identifier: Apache-2.0
#include "smp/version.h"

#define SMP_TEXT_OF(x) #x
#define SMP_TEXT(x) SMP_TEXT_OF(x)

namespace smp {

const char* version() {
  return SMP_TEXT(SMP_VERSION_MAJOR) "." SMP_TEXT(SMP_VERSION_MINOR) "." SMP_TEXT(
      SMP_VERSION_PATCH);
}

const char* libtorch_version() { return TORCH_VERSION; }

}  // namespace smp
