// SPDX-License-Identifier: Apache-2.0
#include "tests/zoo/parity.h"

namespace smp::zoo {

INSTANTIATE_TEST_SUITE_P(Convolutional, Parity, layouts_of(convolutional()), case_name);

}  // namespace smp::zoo
