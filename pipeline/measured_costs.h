// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "pipeline/costs.h"
#include "pipeline/generators.h"
#include "pipeline/schedule.h"
#include "pipeline/timeline.h"

namespace smp::pipeline {

/// The same order of computes with its backwards the other way round: each whole one in two halves,
/// one right after the other, and each split one whole where its first half was. Steps of both show
/// the cost of either kind of backward on every stage. A rank where halves would keep more than its
/// memory limit has those of `schedule`, which is verified; the transfers are made anew.
Schedule exchange_backwards(const Schedule& schedule, const ScheduleOptions& options);

/// The costs of stages and transfers in recorded steps, in us: medians over steps and microbatches,
/// and of several replicas the slowest. The times of unrecorded ones, and the memory of all, are
/// those of `planned`.
///
/// A stage's time is that of its actions, and of receives: the least of those that began when their
/// message was sent. A message's `latency` is from the end of its send to the end of a receive that
/// waited for it, without the time of the receive itself; nothing if none waited. `recorded` has
/// steps of any schedules of the same stages and `edges`.
StageCosts measured_costs(const std::vector<Timeline>& recorded,
                          const std::vector<StageEdge>& edges, const StageCosts& planned);

/// The middle one of some numbers, the upper of two; there is at least one.
double median(std::vector<double> numbers);

}  // namespace smp::pipeline
