// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pipeline/generators.h"

namespace smp::pipeline {

/// Throws `smp::ConfigError` that names the first option out of range.
void check_options(const ScheduleOptions& options);

/// The same, and also when the stages are not placed as the schedule called `name` needs them.
void check_options_of(const char* name, const ScheduleOptions& options);

}  // namespace smp::pipeline
