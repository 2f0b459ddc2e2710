// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "smp/config.h"

namespace smp::tools {

/// A schedule as it would run where a forward takes one slot, a backward two (each half of a split
/// one takes one) and transfers nothing. `schedule` is a name of the configuration's "pipeline", or
/// a file (.csv, .json, .txt); a schedule made by name is for the partitions, microbatches,
/// virtual_stages and active_microbatches of `config`. `format` is "text" (drawn in characters,
/// with the idle time of each rank), "svg", "html", or "json" for the schedule itself.
///
/// Throws `ConfigError` for a name that does not exist, options that do not fit it or a file that
/// cannot be read, and `Error` for a schedule that would not run.
std::string show_schedule(const std::string& schedule, const Config& config,
                          const std::string& format);

}  // namespace smp::tools
