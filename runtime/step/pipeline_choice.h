// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "partitioner/partition.h"
#include "partitioner/plan.h"
#include "partitioner/predict.h"
#include "pipeline/generators.h"
#include "pipeline/ranking.h"
#include "pipeline/stage.h"
#include "pipeline/unsharding.h"
#include "smp/config.h"

namespace smp::runtime {

/// The configuration of pipelines, in the terms of the partitioner and of schedules. Internal; but
/// for those that read files pure functions, so all ranks come to the same result.

/// The schedule of `"pipeline": "file"` in its text form, else "". Throws the errors of reading it.
std::string read_schedule(const Config& config);

/// The costs that `cost_model` names: those of the device, of a GPU by its name, or in a file.
/// Throws the errors of reading it.
partitioner::CostModel read_costs(const Config& config, at::Device device);

/// The step in which a plan is used, by `replicas` pipelines of `ranks` ranks, under the limit of
/// `memory_limit_mb`.
partitioner::StepModel step_model(const Config& config, int ranks, int microbatches, int replicas);

/// How to partition for such a step, except where the stages are placed.
partitioner::PartitionOptions partition_options(const Config& config, int ranks,
                                                const partitioner::StepModel& step);

/// The rank of each stage that the schedule needs, empty for one stage on each rank in order: among
/// several candidates ("auto") the one with the shortest predicted step. `graph` has costs; `file`
/// is the result of `read_schedule`. Throws the errors of `partition` and `plan_step`.
std::vector<int> best_placement(const Config& config, const std::string& file,
                                const graph::Graph& graph,
                                const partitioner::PartitionOptions& options);

/// The units that stages are divided into where replicas divide parameters, in the terms of
/// schedules: all lists but `edges` are by unit.
struct StepUnits {
  std::vector<int> stage_of_unit;
  std::vector<bool> backward_of_unit;
  std::vector<pipeline::StageReads> reads;
  int64_t live = 0;  ///< elements of divided parameters that are whole at one time
  std::vector<pipeline::StageEdge> edges;
  pipeline::StageCosts costs;  ///< costs as predicted
};

/// A plan's step, as far as it is known before it runs: its schedule, verified, and what that
/// follows from. Times are in us.
struct PlannedStep : pipeline::RankedSchedule {
  partitioner::Prediction prediction;
  std::vector<pipeline::Edge> edges;
  pipeline::ScheduleOptions options;  ///< options of schedules, with costs and limits
  std::string report;  ///< why it is this one, if another one was asked for or "auto"; else empty
  std::optional<StepUnits> units = {};  ///< see `divide_into_units`
};

/// Makes the schedule of a plan. `graph` is in the plan's order. `settled`: an earlier graph
/// decided where stages are, so that another schedule may have to do, which `report` says then.
///
/// Throws `ConfigError` where the stages are not placed as the schedule needs them, or a schedule
/// file does not fit the plan, and the errors of reading and verifying it.
PlannedStep plan_step(const Config& config, const std::string& file, const graph::Graph& graph,
                      const partitioner::Plan& plan, int ranks, const partitioner::StepModel& model,
                      bool settled);

}  // namespace smp::runtime
