// SPDX-License-Identifier: Apache-2.0
#include "tools/train/schedule.h"

#include <algorithm>
#include <cmath>

namespace smp::tools::train {

double rate_of(const ScheduleOptions& schedule, int64_t step) {
  if (step < schedule.warmup) {
    return static_cast<double>(step + 1) / static_cast<double>(schedule.warmup);
  }
  if (schedule.shape == "constant") return 1;
  const int64_t length = std::max<int64_t>(schedule.steps - schedule.warmup, 1);
  const double done =
      std::min(static_cast<double>(step - schedule.warmup) / static_cast<double>(length), 1.0);
  const double left = schedule.shape == "cosine" ? (1 + std::cos(M_PI * done)) / 2 : 1 - done;
  return schedule.final_rate + (1 - schedule.final_rate) * left;
}

}  // namespace smp::tools::train
