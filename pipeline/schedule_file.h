// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "pipeline/schedule.h"

namespace smp::pipeline {

/// The file forms of a schedule, docs/schedules.md. CSV is the compute-only form that
/// torch.distributed.pipelining reads and writes: a row for each rank, a cell such as 0F3, 1B0, 1I0
/// or 1W0 for each compute, blank cells ignored. It has no transfers (`lower` makes them), and the
/// rest follows from it: a stage is on the rank in whose row it is, and there is a backward if any
/// cell is one. JSON has all of a schedule, with or without transfers. Neither form says whether
/// the schedule makes sense: that is for `verify`.

/// The compute order in `text`. A cell (0F3;1B0)OVERLAP_F_B, as torch writes for DualPipeV, is its
/// parts one after the other. Throws `smp::Error` with `source_name`, line and column for a cell
/// that is no compute, `smp::ConfigError` for a stage in two rows or in none.
Schedule schedule_from_csv(const std::string& text, const std::string& source_name);

std::string schedule_to_json(const Schedule& schedule);

/// Throws `smp::ConfigError` for text that is not such JSON, with `source_name` and the path in it,
/// and `smp::Error` likewise for an action that cannot be read.
Schedule schedule_from_json(const std::string& text, const std::string& source_name);

/// Whether there are computes only, so that it is still to be lowered.
bool is_compute_order(const Schedule& schedule);

/// Reads the form that the name ends in: .csv, .json, or the text form for .txt. Throws
/// `smp::ConfigError` for another ending and for actions that are added to a lowered schedule, and
/// the errors of the forms above.
Schedule load_schedule(const std::string& path);

}  // namespace smp::pipeline
