// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "tools/train/options.h"

namespace smp::tools::train {

/// The learning rate of update `step`, counted from 0, as a fraction of the highest one. A function
/// of the step alone, so that a resumed run goes on exactly.
double rate_of(const ScheduleOptions& schedule, int64_t step);

}  // namespace smp::tools::train
