// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <string>
#include <vector>

#include "core/refusal.h"
#include "pipeline/costs.h"
#include "pipeline/schedule.h"

namespace smp::pipeline {

/// The input of the generators of schedules.
struct ScheduleOptions {
  /// A pipeline of `stages` stages, each on the rank of its number, connected as a chain.
  ScheduleOptions(int stages, int microbatches);

  /// The chain goes `stages_per_rank` times through all ranks: stage s is on rank s % ranks.
  static ScheduleOptions looped(int ranks, int stages_per_rank, int microbatches);
  /// The chain goes through all ranks and back: rank r has stages r and 2 ranks - 1 - r.
  static ScheduleOptions v_shaped(int ranks, int microbatches);

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
  /// Which stages have backwards and a reduce; all, unless their parameters and inputs need no
  /// gradient. `ScheduleKind::generate` and `make_schedule` leave out those of the others.
  TORCH_ARG(std::vector<bool>, backward_of_stage);
  /// How many microbatches a rank may have in flight, that is begun and not yet finished with their
  /// backward. Only `interleaved` obeys it: the others keep a number by definition.
  TORCH_ARG(int, active_microbatches);
  /// The costs by which `list` and `rank_schedules` decide. By default F = I = W = 1, and all else
  /// nothing.
  TORCH_ARG(StageCosts, costs);
  /// The most that a rank may keep, by rank, in the unit of `costs.kept`; empty: no limit. Only
  /// `list` and `rank_schedules` obey it.
  TORCH_ARG(std::vector<double>, memory_limit);
};

/// The generators. Each gives the order of computes for every rank; `lower` adds the rest. On every
/// stage forwards, input gradients and weight gradients go in ascending microbatch order, so that
/// gradients are always added in the same order. All are right for any `edges`, since they go
/// through the stages as if these were a chain; `least_credit` says how many messages a channel
/// must hold where values skip stages. `ScheduleKind::generate` checks the options, which are right
/// here. p is the number of ranks, r a rank counted along the pipeline, m the number of
/// microbatches, F, B = I + W the times of a rank's forward and backward.

// --- any placement --------------------------------------------------------------------------

/// No rank begins a backward before it has finished all its forwards (GPipe).
Schedule simple(const ScheduleOptions& options);

/// A backward that is ready goes before a forward, and a rank begins another microbatch only while
/// fewer than `active_microbatches` are in flight on it.
///
/// This, `simple` and `forward_only` place actions into slots of equal length: in each slot a rank
/// does at most one forward or backward, chosen from those ready when the slot began, the lowest
/// microbatch first.
Schedule interleaved(const ScheduleOptions& options);

/// Forwards only, for evaluation.
Schedule forward_only(const ScheduleOptions& options);

/// Made from `costs` and `memory_limit`: the best of all schedules that fit and of orders built
/// action by action under several rules, improved by exchanging neighbours on the critical path.
/// Splits backwards where `costs` has their halves and it helps. Throws `smp::PartitionError` when
/// the memory limit of a rank does not hold even one microbatch.
Schedule list_schedule(const ScheduleOptions& options);

// --- one stage on each rank -----------------------------------------------------------------

/// Rank r runs p - r forwards before its first backward, then one forward for each backward
/// (PipeDream-Flush, Narayanan et al. 2021; Megatron-LM): the time of `simple`, but rank r keeps
/// p - r microbatches only.
Schedule one_forward_one_backward(const ScheduleOptions& options);

/// The same with 2 (p - 1 - r) + 1 forwards first, so that slow transfers delay nothing.
Schedule eager_one_forward_one_backward(const ScheduleOptions& options);

/// 1F1B with split backwards: rank r does its weight gradients r microbatches late, while it would
/// wait otherwise (ZB-H1, Qi et al. 2023). Keeps p microbatches on every rank.
Schedule zero_bubble_h1(const ScheduleOptions& options);

/// The same with 2 (p - 1 - r) + 1 forwards first and weight gradients 2 r microbatches late: no
/// rank waits between its first and its last action where F = I = W. Keeps 2 p - 1 microbatches.
Schedule zero_bubble_h2(const ScheduleOptions& options);

// --- several stages on each rank, `ScheduleOptions::looped` ---------------------------------

/// 1F1B over v stages for each rank, in rounds of p microbatches (Narayanan et al. 2021): idle
/// time through v, transfers times v.
Schedule interleaved_one_forward_one_backward(const ScheduleOptions& options);

/// All microbatches go through a rank's first stage before any goes through its next, forwards and
/// backwards (Lamy-Poirier 2023): idle time through v, keeps all m microbatches.
Schedule breadth_first(const ScheduleOptions& options);

// --- two stages on each rank, `ScheduleOptions::v_shaped` -----------------------------------

/// Split backwards on the way there and back (ZB-V, Qi et al. 2024): no rank waits between its
/// first and its last action where F = I = W, and none keeps more than p microbatches.
Schedule zero_bubble_v(const ScheduleOptions& options);

/// One half of DeepSeek's DualPipe, folded (DualPipeV): a forward and a backward of different
/// stages alternate, so that the transfers of one hide behind the other.
Schedule dualpipe_v(const ScheduleOptions& options);

// --- by name --------------------------------------------------------------------------------

/// Where a generator needs the stages.
enum class Placement { kAny, kOnePerRank, kLooped, kVShaped };

/// How many microbatches a rank keeps at most: as many as there are, as `active_microbatches`
/// allows it, or by the number of ranks (docs/schedules.md). Late stages keep fewer but where split
/// backwards keep parts of as many.
enum class InFlight { kAll, kActive, kRanks, kTwiceRanks, kSplitRanks, kSplitTwiceRanks };

/// A generator and its properties.
struct ScheduleKind {
  std::string name;                           ///< name in the configuration
  Schedule (*order)(const ScheduleOptions&);  ///< the generator
  Placement placement;
  InFlight in_flight;
  bool trains;  ///< has backwards
  bool splits;  ///< splits them, at least some

  /// The generator's schedule without backwards that are not needed. Throws `smp::ConfigError` when
  /// an option is out of range, with its name, or when the stages are not placed as the schedule
  /// needs them, with the remedy.
  Schedule generate(const ScheduleOptions& options) const;

  /// Options for `ranks` ranks with `per_rank` stages on each, placed as this schedule needs them;
  /// 0: as few as it needs, which is two for those that visit a rank several times. A schedule that
  /// does not need another placement gets the stages looped.
  ScheduleOptions place(int ranks, int per_rank, int microbatches) const;

  /// Why the stages of `options` are not placed as this schedule needs them, and the remedy.
  core::Refusal why_misplaced(const ScheduleOptions& options) const;
};

/// All of them, in the order of the documentation.
const std::vector<ScheduleKind>& schedule_kinds();

/// The one of this name. Throws `smp::ConfigError` that lists the names.
const ScheduleKind& schedule_kind(const std::string& name);

/// The schedule of the generator of this name.
Schedule make_schedule(const std::string& name, const ScheduleOptions& options);

/// The same without the backwards and the reduces of stages that need none.
Schedule without_backwards(const Schedule& schedule, const std::vector<bool>& backward_of_stage);

// --- transfers ------------------------------------------------------------------------------

/// Adds to a schedule of compute actions: before each forward and backward the receives it needs,
/// after it the sends of its results, nearest stage first, and after the last weight gradients of a
/// stage its reduce. Stages of one rank hand values over without a transfer. Adds nothing that
/// depends on time, so it also lowers compute orders written by hand. `least_credit` says how many
/// messages the channels must hold.
Schedule lower(const Schedule& order, const std::vector<StageEdge>& edges);

}  // namespace smp::pipeline
