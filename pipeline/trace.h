// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "pipeline/timeline.h"

namespace smp::pipeline {

/// All steps as a trace of the Chrome Trace Event format, for ui.perfetto.dev and chrome://tracing:
/// a process for each replica and a thread for each rank; an event for each action, with its stage,
/// microbatch and bytes; an arrow for each transfer; a counter of the bytes that each rank keeps.
/// The prediction is a process of its own, which begins with the first step. One event a line.
std::string to_trace(const Timeline& timeline);

}  // namespace smp::pipeline
