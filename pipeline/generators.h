#pragma once

#include <torch/arg.h>

#include <vector>

#include "pipeline/schedule.h"

namespace smp::pipeline {

/// What a schedule is made for.
struct ScheduleOptions {
  /// A pipeline of `stages` stages, each on the rank of its number, connected as a chain.
  ScheduleOptions(int stages, int microbatches);

  /// Number of stages.
  TORCH_ARG(int, stages);
  /// Number of microbatches in a step.
  TORCH_ARG(int, microbatches);
  /// Number of ranks.
  TORCH_ARG(int, ranks);
  /// The rank that owns each stage.
  TORCH_ARG(std::vector<int>, rank_of_stage);
  /// Which stages send to which.
  TORCH_ARG(std::vector<StageEdge>, edges);
  /// How many microbatches a rank may have in flight, that is begun and not yet finished with
  /// their backward. Only `interleaved` obeys it: `simple` keeps all of them by definition.
  TORCH_ARG(int, active_microbatches);
};

/// The two pipelines of the configuration parameter `pipeline`.
///
/// The generators place actions into slots of equal length: in each slot a rank does at most one
/// forward or backward, chosen from what was ready when the slot began, the lowest microbatch
/// first. On every stage both forwards and backwards run in ascending microbatch order, so that
/// gradients are always added in the same order. The results hold compute actions only; `lower`
/// adds the rest. All throw `smp::ConfigError` (an option is out of range or missing) with its
/// name.

/// No rank begins a backward before it has finished all its forwards (GPipe).
Schedule simple(const ScheduleOptions& options);

/// A backward that is ready goes before a forward, and a rank begins another microbatch only
/// while fewer than `active_microbatches` are in flight on it.
Schedule interleaved(const ScheduleOptions& options);

/// Forwards only, for evaluation.
Schedule forward_only(const ScheduleOptions& options);

/// Adds to a schedule of compute actions: before each forward and backward the receives it
/// needs, after it the sends of what it made, nearest stage first, and after the last backward of
/// a stage its reduce. Stages of one rank hand values over without a transfer. Adds nothing that
/// depends on time, so it also lowers compute orders written by hand.
Schedule lower(const Schedule& order, const std::vector<StageEdge>& edges);

}  // namespace smp::pipeline
