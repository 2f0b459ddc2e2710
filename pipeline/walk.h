// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>

#include "pipeline/schedule.h"

namespace smp::pipeline {

/// Called with an action and its position (from 0) in the list of its rank.
using Visit = std::function<void(int rank, size_t position, const Action& action)>;

/// Steps all ranks through their lists, each as far as it gets, and calls `visit` for every action
/// after the actions it waits for. A receive waits for its send; a send waits while its channel
/// (directed edge, forward or backward) holds `credit` messages that were sent and not received.
/// Throws `smp::Error` on deadlock; it names the awaited action of each rank in the circle. The
/// actions must be well formed and the transfers paired and in microbatch order, which `verify`
/// checks.
void walk(const Schedule& schedule, int credit, const Visit& visit);

/// The least credit from `at_least` on with which `walk` gets to the end, if any below the number
/// of microbatches does; else that number, since a channel never holds more.
int least_credit(const Schedule& schedule, int at_least);

}  // namespace smp::pipeline
