// SPDX-License-Identifier: Apache-2.0
#include "tests/zoo/parity.h"

namespace smp::zoo {

INSTANTIATE_TEST_SUITE_P(Generative, Parity, layouts_of(generative()), case_name);

}  // namespace smp::zoo
