// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace smp::tools::train {

/// The order of `count` samples in an epoch: sample i has as its key the i-th number that
/// SplitMix64 gives from a start that follows from seed and epoch, and samples come in the order of
/// their keys, of which no two are equal. docs/smp_train.md has the formulas.
std::vector<int64_t> order_of(int64_t count, uint64_t seed, uint64_t epoch);

}  // namespace smp::tools::train
