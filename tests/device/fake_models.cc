// SPDX-License-Identifier: Apache-2.0
#include "tests/device/models_suite.h"

namespace smp::testing {

/// Small: the kernels are the CPU's. The fake device has no convolutions.
ModelSizes sizes() {
  return {/*layers=*/2,   /*width=*/16, /*heads=*/2,    /*length=*/8,
          /*channels=*/4, /*side=*/8,   /*casts=*/true, /*convolves=*/false};
}

}  // namespace smp::testing
