// SPDX-License-Identifier: Apache-2.0
#include "tests/zoo/parity.h"

namespace smp::zoo {

INSTANTIATE_TEST_SUITE_P(Sequences, Parity, layouts_of(sequences()), case_name);

}  // namespace smp::zoo
