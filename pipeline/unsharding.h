// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/schedule.h"

namespace smp::pipeline {

/// Elements of divided parameters that the computes of a stage read; 0: none.
struct StageReads {
  int64_t forward = 0;
  int64_t backward = 0;

  int64_t of(const Action& compute) const {
    return compute.kind == Action::Kind::kForward ? forward : backward;
  }
};

/// The computes of a schedule of stages, for the units that these are divided into: a forward runs
/// through the units of its stage, a backward the other way round. `stage_of_unit` ascends; units
/// have backwards by `backward_of_unit`.
Schedule order_of_units(const Schedule& schedule, const std::vector<int>& stage_of_unit,
                        const std::vector<bool>& backward_of_unit);

/// Adds to a lowered schedule the actions that gather and free divided parameters, `reads` by
/// stage. A stage stays unsharded over computes of one rank that follow each other, but for those
/// that read nothing. The next one is gathered while it computes, where both read no more than
/// `most` elements together, else when it is resharded.
Schedule with_unsharding(const Schedule& lowered, const std::vector<StageReads>& reads,
                         int64_t most);

/// Throws `smp::Error` that names the first rank, position and action at fault unless each compute
/// that reads divided parameters finds its stage unsharded, nothing is unsharded or freed twice or
/// left at the end, and no rank has several stages unsharded that read more than `most` elements
/// together.
void verify_unsharding(const Schedule& schedule, const std::vector<StageReads>& reads,
                       int64_t most);

}  // namespace smp::pipeline
