// SPDX-License-Identifier: Apache-2.0
#include "tests/zoo/parity.h"

namespace smp::zoo {

INSTANTIATE_TEST_SUITE_P(Irregular, Parity, layouts_of(irregular()), case_name);

}  // namespace smp::zoo
